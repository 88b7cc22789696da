"""The built-in jobs, written as a user writes them: one file with a function named `job`."""
