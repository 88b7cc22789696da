"""What crosses the process boundary, as files."""
