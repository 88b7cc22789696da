"""reference: one process that plays every replica in turn. It defines what N ranks must compute.

Slow on purpose and independent on purpose: it has its own schedule, share and evaluation, and imports none of ours,
because a fault that both sides share is invisible. From samestep it takes plain values only.
"""

from samestep.reference.fetch import digests, fetch
from samestep.reference.noise import Noise
from samestep.reference.play import play

__all__ = ["Noise", "digests", "fetch", "play"]
