"""Neutral passes and passes on FX; `PASSES` is the one table of them all."""
