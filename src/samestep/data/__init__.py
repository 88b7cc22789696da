"""Which rank sees which sample at which step, and how the samples get there."""
