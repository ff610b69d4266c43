"""Several processes: which of them train one model together."""
