"""The neutral passes: from rules to a plan."""
