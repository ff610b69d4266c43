"""Many processes that train one model: their group, what they agree on, and what each of them holds."""
