"""torch.fx: capture, lowering to the neutral graph, tools for passes."""
