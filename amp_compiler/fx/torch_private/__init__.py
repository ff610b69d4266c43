"""The one place that touches torch's private interfaces, and looks for what differs between torch 2.11 and 2.14."""
