"""Runs an engine's `train` and explains its errors; where memory is short, finds how many rows fit."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from samestep.data.loader import Rows, to_device
from samestep.engine import Engine
from samestep.errors import Refused, SamestepError, UserError
from samestep.job import Batch, Job, MicroBatch
from samestep.message import AS_SAID, Message, as_said, message
from samestep.rank.hardware import is_out_of_memory
from samestep.rank.shards import explain_optimizer_on_shards
from samestep.rank.step import explain_strides, explain_wrapped_model
from samestep.rank.weights import StateDict
from samestep.training import Run
from samestep.world import World


def with_sync_batchnorm(job: Job, world: World) -> Job:
    """Returns `job` with SyncBatchNorm layers if it has sync_batchnorm and there is more than one rank."""
    if not job.sync_batchnorm or world.replicas == 1:
        return job
    return replace(job, model=lambda: torch.nn.SyncBatchNorm.convert_sync_batchnorm(job.model()))


def run_engine(engine: Engine, job: Job, world: World, run: Run, settings: Mapping[str, Any]) -> StateDict:
    """Trains `job` with an engine. Returns the full state dict on rank 0.

    Raises UserError when there is no memory for a batch, Refused for an error that the engine explains.
    """
    run.fragments_of = engine.fragments
    try:
        return engine.train(with_sync_batchnorm(job, world), world, run, **settings)
    except Refused as error:
        error.message = _said(error.message)
        raise
    except SamestepError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            error.__traceback__ = None  # its frames hold the tensors that fill the memory
            run.release()
            raise (out_of_memory(job, run.micro_batch, world) if run.micro_batch else no_model(job, world)) from None
        explanation: str | Message | None = (
            explain_optimizer_on_shards(error, job) or explain_strides(error, job) or explain_wrapped_model(error, job)
        )
        if explanation is None and isinstance(error, RuntimeError | AssertionError):
            explanation = engine.checks.explain(error, job)
        if explanation is None:
            raise
        raise Refused(_said(explanation)) from error


def _said(why: str | Message) -> Message:
    """Returns what an engine says; a sentence, as another package's engine may give, becomes a message of its own."""
    said = as_said(why) if isinstance(why, str) else why
    return message("refused_by_engine", text=said.fields["text"]) if said.id == AS_SAID else said


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
