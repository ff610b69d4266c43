"""`amp.compile` and `amp.explain`."""
