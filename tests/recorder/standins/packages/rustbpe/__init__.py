"""A stand-in for rustbpe, which is imported and not used here."""
