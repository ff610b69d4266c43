"""A training step whose function is several graphs: our backend for each, autograd between, the update as one graph."""
