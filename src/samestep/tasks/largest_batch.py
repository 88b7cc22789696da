"""Finds how many rows fit into memory after a batch did not."""

from __future__ import annotations

import gc
from dataclasses import replace

import torch

from samestep.data.loader import Rows, to_device
from samestep.errors import UserError
from samestep.job import Batch, Job, Part
from samestep.world import World


def out_of_memory(job: Job, part: Part, world: World) -> UserError:
    """Returns the error for a micro-batch that does not fit into memory. Tries smaller ones to name one that does."""
    rows = len(part.indices)
    message = f"step {part.step}: rank {world.rank} has no memory for {rows} rows at once"
    fits = rows // 2
    while fits and not _fits(job, part, fits, world):
        fits //= 2
    if not fits:
        return UserError(
            f"{message}, nor for 1 when it was tried with the whole model here; smaller rows need less, and so does an "
            "engine that shards the model, such as --engine fsdp"
        )
    if job.gather_outputs:
        return UserError(
            f"{message}; {fits} fit{'s' * (fits == 1)}, and gather_outputs needs all at once: use more ranks, or a "
            "smaller global_batch"
        )
    return UserError(
        f"{message}; {fits} fit{'s' * (fits == 1)}: --set micro_batch={fits} takes the same step, in more parts"
    )


def _fits(job: Job, part: Part, rows: int, world: World) -> bool:
    """Returns whether a step on the first `rows` rows fits: forward, backward and optimizer.step()."""
    try:
        _step(job, replace(part, indices=part.indices[:rows], rows=rows), world)
    except (RuntimeError, MemoryError):
        return False
    finally:
        gc.collect()
        if world.device != "cpu":
            torch.cuda.empty_cache()
    return True


def _step(job: Job, part: Part, world: World) -> None:
    model = job.model().to(world.device)
    optimizer = job.optimizer.build(model)
    batch = Batch(to_device(Rows(job)[part][1], world.device), part)
    turn = job.of_phases()[part.phase]
    turn.criterion(turn.forward(model, batch), batch).backward()
    optimizer.step()
