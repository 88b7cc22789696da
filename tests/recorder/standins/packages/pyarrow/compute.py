"""Functions of tables, which are imported and not used here."""
