"""The figures of the report: pure functions of measured numbers."""
