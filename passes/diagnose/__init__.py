"""What is put into a graph to see what goes through it; no value is changed."""
