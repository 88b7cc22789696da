"""Types of columns, which are imported and not used here."""
