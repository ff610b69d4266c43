"""A plan carried out on an FX graph."""
