"""Runs an engine's `train` and explains its errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from samestep.engine import Engine
from samestep.errors import Refused
from samestep.job import Job
from samestep.message import AS_SAID, Message, as_said, message
from samestep.rank.hardware import is_out_of_memory
from samestep.rank.weights import StateDict
from samestep.tasks.largest_batch import no_model, out_of_memory
from samestep.training import Run
from samestep.world import World


def with_sync_batchnorm(job: Job, world: World) -> Job:
    """Returns `job` with SyncBatchNorm layers if it has sync_batchnorm and there is more than one rank."""
    if not job.sync_batchnorm or world.size == 1:
        return job
    return replace(job, model=lambda: torch.nn.SyncBatchNorm.convert_sync_batchnorm(job.model()))


def run_engine(engine: Engine, job: Job, world: World, run: Run, settings: Mapping[str, Any]) -> StateDict:
    """Trains `job` with an engine. Returns the full state dict on rank 0.

    Raises UserError when there is no memory for a batch, Refused for an error that the engine explains.
    """
    run.fragments_of = engine.fragments
    try:
        return engine.train(with_sync_batchnorm(job, world), world, run, **settings)
    except RuntimeError as error:
        if is_out_of_memory(error):
            error.__traceback__ = None  # its frames hold the tensors that fill the memory
            run.release()
            raise (out_of_memory(job, run.micro_batch, world) if run.micro_batch else no_model(job, world)) from None
        explanation = engine.checks.explain(error, job)
        if explanation is None:
            raise
        raise Refused(_said(explanation)) from error
    except Refused as error:
        error.message = _said(error.message)
        raise


def _said(why: str | Message) -> Message:
    """Returns what an engine says; a sentence, as another package's engine may give, becomes a message of its own."""
    said = as_said(why) if isinstance(why, str) else why
    return message("refused_by_engine", text=said.fields["text"]) if said.id == AS_SAID else said
