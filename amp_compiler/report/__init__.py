"""Tables for people: plans in the terminal, as HTML, plots."""
