"""Judges whether the losses of the ranks are together the loss of one process."""

from __future__ import annotations

import math

from samestep.judge.findings import Ranks
from samestep.records.script import ScriptRecord


def losses_of(ranks: Ranks, step: int) -> list[float | None]:
    """Returns the sum of the losses of a step of each rank, without a gradient scaler's factor; None where one is not
    known."""
    steps = [rank.steps[step] for rank in ranks]
    values = [[batch.value for batch in of_rank.micro_batches] for of_rank in steps]
    return [
        None if None in of_rank or not of_rank else sum(v or 0.0 for v in of_rank) / (rank_step.scale or 1.0)
        for of_rank, rank_step in zip(values, steps)
    ]


def same_loss(ranks: Ranks, one_process: ScriptRecord, step: int, near: float) -> bool | None:
    """Returns whether the mean over ranks of a step's losses is the loss of one process, within `near` of it; None
    where that is not known. A loss of other rows or labels is near this one, too, before anything is learned."""
    *of_ranks, one_process_loss = losses_of([*ranks, one_process], step)
    known = [value for value in of_ranks if value is not None]
    if one_process_loss is None or len(known) < len(of_ranks):
        return None
    return math.isclose(sum(known) / len(known), one_process_loss, rel_tol=near)
