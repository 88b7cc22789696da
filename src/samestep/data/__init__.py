"""The schedule (which rank trains on which sample at which step) and the loader that follows it."""
