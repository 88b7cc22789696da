"""The models that the built-in jobs train, one file each."""
