"""Finds how many rows fit into memory after a batch did not."""

from __future__ import annotations

import gc
from dataclasses import replace

import torch

from samestep.data.loader import Rows, to_device
from samestep.errors import UserError
from samestep.job import Batch, Job, MicroBatch
from samestep.message import message
from samestep.world import World


def out_of_memory(job: Job, micro_batch: MicroBatch, world: World) -> UserError:
    """Returns the error for a micro-batch that does not fit into memory. Tries smaller ones to name one that does.

    The memory of the training must have been freed before.
    """
    rows, place = len(micro_batch.indices), {"step": micro_batch.step, "rank": world.rank}
    if _fits(job, micro_batch, rows, world):
        return UserError(message("out_of_memory_though_rows_fit", rows=rows, **place))
    fits = rows // 2
    while fits and not _fits(job, micro_batch, fits, world):
        fits //= 2
    if not fits and not _fits(job, micro_batch, 0, world):
        return no_model(job, world)
    if not fits:
        return UserError(message("out_of_memory_with_one_row", rows=rows, **place))
    if job.gather_outputs:
        return UserError(message("out_of_memory_with_gathered_outputs", rows=rows, fits=fits, **place))
    return UserError(message("out_of_memory_with_so_many_rows", rows=rows, fits=fits, **place))


def no_model(job: Job, world: World) -> UserError:
    """Returns the error for a model that does not fit into memory, whatever its rows."""
    optimizer = job.of_phases()[0].optimizer.cls.__name__
    return UserError(message("out_of_memory_for_the_model", rank=world.rank, optimizer=optimizer))


def _fits(job: Job, micro_batch: MicroBatch, rows: int, world: World) -> bool:
    """Returns whether a step on the first `rows` rows fits: forward, backward and optimizer.step(). 0: with gradients
    alone."""
    try:
        _step(job, replace(micro_batch, indices=micro_batch.indices[:rows], rows=rows), world)
    except (RuntimeError, MemoryError):
        return False
    finally:
        gc.collect()
        if world.device != "cpu":
            torch.cuda.empty_cache()
    return True


def _step(job: Job, micro_batch: MicroBatch, world: World) -> None:
    model = job.model().to(world.device)
    optimizer = job.optimizer.build(model)
    if micro_batch.rows:
        batch = Batch(to_device(Rows(job)[micro_batch][1], world.device), micro_batch)
        turn = job.of_phases()[micro_batch.phase]
        turn.criterion(turn.output(model, batch), batch).backward()
    else:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
