"""The tasks of a worker process, one file each."""
