"""Automatic mixed precision as a compiler pass over traced graphs."""
