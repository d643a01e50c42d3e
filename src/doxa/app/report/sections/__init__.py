"""The parts of a report, one file a part: each reads a `Subject` and gives its content."""
