"""What lowers a framework's graph to a `PrecisionGraph` and carries a plan back."""
