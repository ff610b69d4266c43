"""Which nodes have to stay in FP32 for a model to keep a tolerance: measured, searched and written as rules."""
