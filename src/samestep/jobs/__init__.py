"""The built-in jobs, each written as a user would write it: one file, one function named `job`."""
