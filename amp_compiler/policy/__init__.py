"""From YAML to a `RuleSet`, and from a `RuleSet` to a decision on each node."""
