"""`amp.training_step`."""
