"""The repository's own wrappers, of environments that are stand-ins here."""
