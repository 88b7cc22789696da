"""Small models that the built-in jobs train. Each is one file, to be copied."""
