"""The solver behind the neutral passes: which type each value has, and which labels cost least."""
