"""From a captured graph to its normal form."""
