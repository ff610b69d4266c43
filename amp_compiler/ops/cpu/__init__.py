"""Native loops for a CPU, compiled when they are first needed."""
