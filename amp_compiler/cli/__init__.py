"""The command `amp-compiler`."""
