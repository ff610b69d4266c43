"""What a device does faster in another form."""
