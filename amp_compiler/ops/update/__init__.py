"""The gradient check and the optimizer updates as operators."""
