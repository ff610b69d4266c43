"""Optimizers in a step: those with a fused update, and others, whose step is traced."""
