"""`amp.training_step`: forward, backward, check, clipping and update as one graph."""
