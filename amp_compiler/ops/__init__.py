"""What a graph may call: operators of our own, and what runs them."""
