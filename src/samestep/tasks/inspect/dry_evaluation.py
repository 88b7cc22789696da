"""Evaluates a job's model on a few rows, before any engine does: each metric, the criterion, and what draws random
numbers."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from samestep.data.loader import KeyedRandom, Rows, fetch, to_device
from samestep.data.schedule import schedule_of
from samestep.errors import UserError, not_per_row
from samestep.job import Batch, Job, counts_by_itself, reads_batch
from samestep.job.walk import without_graph
from samestep.message import message
from samestep.rank.evaluate import count_metric, evaluate
from samestep.rank.step import default_generator
from samestep.reference.replica_state import output_and_loss
from samestep.tasks.inspect.dry_step import ROWS, raising
from samestep.world import World

EVALUATION_ROWS = 16


@dataclass(frozen=True)
class DryEvaluation:
    """What an evaluation of a few rows showed. draws: what draws random numbers: 'dataset', 'collate', 'model'.
    has_loss: whether the criterion returns a loss there."""

    draws: tuple[str, ...] = ()
    has_loss: bool = True


def dry_evaluation(
    job: Job, model: nn.Module, device: str, few: int = ROWS, at_once: int = EVALUATION_ROWS
) -> DryEvaluation:
    """Evaluates `model` on two small batches of the job's evaluation. Raises UserError as dry_step does.

    few: the rows that metrics are called with. at_once: those of a batch.
    """
    if job.evaluation is None:
        return DryEvaluation()
    subset: Any = Subset(job.evaluation, range(min(2 * at_once, len(job.evaluation))))  # type: ignore[arg-type]
    small = replace(job, evaluation=subset, micro_batch=at_once, gather_outputs=False, workers=0)
    rows = replace(small.evaluated(), global_batch=1, weight=None, shuffle=False)
    draws = _draws(rows, model, device, few)
    _check_metrics(rows, model, device, few)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of metrics that expect more rows
        found = raising("evaluation", lambda: evaluate(small, model.to(device), World(devices=(device,))), at_once)
    if not found.sums:
        raise UserError(message("evaluation_measures_nothing"))
    has_loss = "loss" in found.sums
    if not has_loss and job.scheduler and job.scheduler.every == "evaluation" and job.scheduler.metric == "loss":
        raise UserError(message("scheduler_steps_by_a_missing_loss", metric=next(iter(job.metrics))))
    return DryEvaluation(draws, has_loss)


def _draws(job: Job, model: nn.Module, device: str, few: int) -> tuple[str, ...]:
    """Returns what draws random numbers. job: its training data are the evaluation's."""
    rows = list(range(min(few, len(job.train))))
    micro_batch = replace(schedule_of(job, 1).step(0, 0, 0)[0], indices=np.array(rows), rows=len(rows))
    model, stream = model.to(device).eval(), default_generator(device)
    read, before = Rows(job), stream.get_state()
    keyed = {what: KeyedRandom() for what in ("dataset", "collate", "model")}
    samples = raising("reading", lambda: keyed["dataset"](lambda: fetch(read.dataset, rows)), len(rows))
    data = raising("reading", lambda: keyed["collate"](lambda: read.collate(samples)), len(rows))
    batch = Batch(to_device(data, device), micro_batch)
    raising("forward", lambda: keyed["model"](lambda: without_graph(job.output, model, batch)), len(rows))
    on_gpu = not torch.equal(before, stream.get_state())
    return tuple(what for what in keyed if keyed[what].drawn or (on_gpu and what == "model"))


def _check_metrics(job: Job, model: nn.Module, device: str, few: int) -> None:
    """Calls each metric on some rows of `job.train`, which the caller has set to the evaluation's."""
    micro_batch = replace(schedule_of(job, 1), global_batch=min(few, len(job.train))).step(0, 0, 0)[0]
    model = model.to(device).eval()
    batch = Batch(
        to_device(raising("reading", lambda: Rows(job)[micro_batch][1], micro_batch.rows), device), micro_batch
    )
    with torch.no_grad():
        output = raising("forward", lambda: without_graph(job.output, model, batch), micro_batch.rows)
        try:
            raising("criterion", lambda: without_graph(output_and_loss, job, model, batch), micro_batch.rows)
        except UserError as error:
            kind, name = _kind_of(output), type(output).__name__
            raise UserError(
                message("criterion_fails_in_the_evaluation", output=kind, type=name, why=error.message)
            ) from error
        for name, metric in job.metrics.items():
            if counts_by_itself(metric):
                if batch.targets is None and not reads_batch(metric):
                    raise UserError(message("metric_gets_no_targets", metric=name))
                raising(f"metric '{name}'", lambda metric=metric: count_metric(metric, output, batch), micro_batch.rows)
                continue
            values = raising(f"metric '{name}'", lambda metric=metric: metric(output, batch), micro_batch.rows)
            if not isinstance(values, Tensor) or list(values.shape) != [micro_batch.rows]:
                raise not_per_row(name, list(getattr(values, "shape", [])), micro_batch.rows)


def _kind_of(output: Any) -> str:
    """Names what forward returns, for a sentence: 'a list of dict'."""
    inner = f" of {type(output[0]).__name__}" if isinstance(output, list | tuple) and output else ""
    return f"a {type(output).__name__}{inner}"
