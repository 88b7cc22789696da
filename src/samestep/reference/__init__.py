"""The reference: one process that computes what N ranks must compute, one replica after the other.

It is slow and independent on purpose. It has its own schedule, shares and evaluation and imports none of the package's,
because a fault that both sides share would be invisible.
"""

from samestep.reference.fetch import collate_draws, digests, fetch
from samestep.reference.held_randomness import HeldRandomness, RowDimensions
from samestep.reference.life import Life
from samestep.reference.noise import Noise
from samestep.reference.one_step import Rates, ReplicaBefore, StepAfter, StepBefore, replay_step
from samestep.reference.play import TrainingResult, play
from samestep.reference.schedule import per_epoch
from samestep.reference.separation import Repeatability, repeatability, row_dimensions, separate

__all__ = [
    "HeldRandomness",
    "Life",
    "Noise",
    "Rates",
    "Repeatability",
    "ReplicaBefore",
    "RowDimensions",
    "StepAfter",
    "StepBefore",
    "TrainingResult",
    "collate_draws",
    "digests",
    "fetch",
    "per_epoch",
    "play",
    "repeatability",
    "replay_step",
    "row_dimensions",
    "separate",
]
