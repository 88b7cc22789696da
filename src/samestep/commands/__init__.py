"""What each command does, in the process that the user has typed: it plans, starts, watches and judges."""
