"""Where the time of a step goes: waiting for data, computing, and the rest, most of it communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from samestep.records.record import TrainingRecord


@dataclass(frozen=True)
class StepParts:
    """Mean milliseconds of a rank's steps. wait: for data. compute: in which the training thread was on a processor.
    other: the rest: collectives and the ranks that they wait for, and processors that others use."""

    rank: int
    steps: int
    step: float
    wait: float
    compute: float
    other: float


def step_parts(ranks: Sequence[TrainingRecord], first: int = 1) -> list[StepParts]:
    """Returns each rank's means. first: steps that are left out, where there are more."""
    return [_parts(rank, record, first) for rank, record in enumerate(ranks) if record.busy_s]


def _parts(rank: int, record: TrainingRecord, first: int) -> StepParts:
    first = first if len(record.step_s) > first else 0
    count = len(record.step_s) - first
    step, wait, busy = (1e3 * sum(times[first:]) / count for times in (record.step_s, record.wait_s, record.busy_s))
    compute = min(busy, step - wait)  # clocks differ by microseconds
    return StepParts(rank, count, step, wait, compute, max(0.0, step - wait - compute))
