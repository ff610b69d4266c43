"""`amp.compile` and `amp.explain`: a model captured, planned, rewritten and run."""
