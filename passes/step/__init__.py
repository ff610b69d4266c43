"""From a rewritten forward to a whole training step."""
