"""One point: the maximum of the log joint."""
