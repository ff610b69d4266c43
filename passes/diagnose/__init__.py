"""What is counted in a graph, which changes no value."""
