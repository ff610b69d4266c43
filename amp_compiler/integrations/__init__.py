"""Training steps inside the loops of other frameworks; each module needs the framework that it is named after."""
