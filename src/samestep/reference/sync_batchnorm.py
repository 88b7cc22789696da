"""SyncBatchNorm: one forward pass over the rows of all replicas, in which BatchNorm sees them as it does on N ranks."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import nn

from samestep.errors import UserError
from samestep.job import Batch, Job
from samestep.job.walk import mapped_tensors
from samestep.reference.fetch import fetch, place, random_state
from samestep.reference.noise import Noise
from samestep.reference.schedule import weight


def synced_outputs(
    job: Job,
    model: nn.Module,
    of_replica: list[list[int]],
    step: int,
    micro: int,
    epoch: int,
    noise: Noise | None,
    phase: int = 0,
) -> list[Any]:
    """Each replica's output. Raises UserError for a model that draws random numbers, which would fall on other rows."""
    if job.carry_state:
        raise UserError("the proof takes sync_batchnorm or carry_state, not both; verify it with one of them")
    device = str(next(model.parameters()).device)
    rows = [row for rows in of_replica for row in rows]
    data = fetch(job, rows, epoch, device)
    before = random_state(device)
    micro_batch = place(step, micro, rows, epoch, weight(job, rows), phase)
    batch = Batch(noise.perturbed(data) if noise else data, micro_batch)
    output = job.forward(model, batch)
    if not torch.equal(before, random_state(device)):
        raise UserError(
            "the proof of sync_batchnorm runs all ranks' rows at once, and dropout would fall on others than on the "
            "ranks; verify it without dropout, or without sync_batchnorm"
        )
    ends = list(accumulate(map(len, of_replica)))
    return [_rows(output, first, last, len(rows)) for first, last in zip([0, *ends], ends)]


def _rows(output: Any, first: int, last: int, rows: int) -> Any:
    return mapped_tensors(lambda t: t[first:last] if t.dim() and len(t) == rows else t, output)
