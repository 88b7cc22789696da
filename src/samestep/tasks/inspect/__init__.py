"""Inspects a job and the engines before a launch."""
