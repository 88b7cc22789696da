"""One tree of processes: started, watched, ended, and its first error told once."""
