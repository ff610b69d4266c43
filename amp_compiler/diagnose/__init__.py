"""Where range is lost: what goes through a graph, which node broke, which rule fixes it."""
