"""The launchers, one module each: every file in this folder is a launcher."""
