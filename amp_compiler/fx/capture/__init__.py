"""From a user's function to an ATen graph: by Dynamo, or by `torch.export` for what becomes a file."""
