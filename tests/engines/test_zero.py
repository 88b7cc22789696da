"""Engine zero: a schedule that reads the optimizer's defaults, of which ZeRO knows those that were given alone."""

from __future__ import annotations

from dataclasses import replace

from torch.optim import NAdam
from torch.optim.lr_scheduler import OneCycleLR

from mutations.jobs import warming
from ranks import Ranks, prove
from samestep import Job, LRSchedule, Recipe


def job() -> Job:
    one_cycle = LRSchedule(lambda optimizer: OneCycleLR(optimizer, 0.05, total_steps=100))
    return replace(warming(), optimizer=Recipe(NAdam, {"lr": 1e-2}), scheduler=one_cycle)


def test_a_schedule_that_moves_the_momentum() -> None:
    with Ranks(1) as reference_rank, Ranks(2, threads=True) as ranks:
        assert prove(reference_rank, ranks, f"{__file__}:job", "zero").verdict == "same"
