"""What a step reports: events, readings, the log, where it is not finite."""
