"""The one place that touches torch's private interfaces; what differs between torch 2.11 and 2.14 is looked for here."""
