"""Rule presets, the op table and their schema, as data."""
