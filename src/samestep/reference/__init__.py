"""The reference: one process that computes what N ranks must compute, one replica after the other.

It is slow and independent on purpose. It has its own schedule, shares and evaluation and imports none of the package's,
because a fault that both sides share would be invisible.
"""

from samestep.reference.fetch import digests, fetch
from samestep.reference.life import Life
from samestep.reference.neutral import Neutral
from samestep.reference.noise import Noise
from samestep.reference.one_step import Rates, ReplicaBefore, StepAfter, StepBefore, replay_step
from samestep.reference.play import TrainingResult, play
from samestep.reference.schedule import per_epoch
from samestep.reference.separation import Repeatability, repeatability, separate

__all__ = [
    "Life",
    "Neutral",
    "Noise",
    "Rates",
    "Repeatability",
    "ReplicaBefore",
    "StepAfter",
    "StepBefore",
    "TrainingResult",
    "digests",
    "fetch",
    "per_epoch",
    "play",
    "repeatability",
    "replay_step",
    "separate",
]
