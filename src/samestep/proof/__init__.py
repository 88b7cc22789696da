"""Is it the same training? Pure functions of two records."""
