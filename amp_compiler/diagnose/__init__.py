"""Where range is lost: what goes through a graph, which node broke, which rule mends it."""
