"""The one place that touches torch's private interfaces, each looked for before it is used (torch 2.11 to 2.15)."""
