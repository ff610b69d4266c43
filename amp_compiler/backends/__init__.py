"""What executes a rewritten graph."""
