"""What a worker process can be asked to do: one file a task."""
