"""Pure functions that turn measured numbers into the report's figures."""
