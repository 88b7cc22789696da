"""Judges whether two records are of the same training: pure functions."""
