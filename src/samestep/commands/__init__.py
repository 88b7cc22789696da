"""The commands, in the process that the user starts: they plan launches, start and watch them, and judge records."""
