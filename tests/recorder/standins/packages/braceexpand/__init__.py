"""A stand-in for braceexpand, which is imported and not used here."""
