"""Saves the weights on rank 0, and evaluates them on all ranks, each row once: what plain_evaluation.py does, also with
weights of rows, without a loss, with torchmetrics' metrics, and for models that compute a derivative."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from samestep.job import Batch, Job, counts_by_itself, reads_batch
from samestep.job.walk import mapped_tensors
from samestep.tasks.eject.runtime.loaded_rows import loaded
from samestep.tasks.eject.runtime.micro_batch import MicroBatch
from samestep.tasks.eject.runtime.world import World

COUNTS = True  # a metric counts by itself, as torchmetrics'
DERIVES = True  # the model may compute a derivative in its forward


def finish(job: Job, state: dict[str, Any], world: World) -> None:
    """Saves rank 0's state dict, and prints its evaluation."""
    if world.rank == 0:
        torch.save({n: t.detach().cpu() if isinstance(t, Tensor) else t for n, t in state.items()}, "weights.pt")
    if job.evaluation is not None:
        means = evaluate(job, state, world)
        if world.rank == 0:
            figures = ", ".join(f"{name} {mean!r}" for name, mean in means.items())
            print(f"evaluation over {len(job.evaluation)} rows, each once: {figures}", flush=True)


def evaluate(job: Job, state: dict[str, Any], world: World) -> dict[str, float]:
    """Returns the mean loss and each metric of rank 0's weights, the same figures on any number of ranks."""
    model = job.model().to(world.device).eval()
    if world.rank == 0:
        model.load_state_dict(state)
    world.broadcast(value for value in model.state_dict().values() if isinstance(value, Tensor))
    sums: list[Any] = []
    with torch.no_grad():
        for batch in loaded(job, chunks(job, world), world.device, evaluates=True):
            if DERIVES:
                sums.append(sums_with_derivatives(job, model, batch))
            else:
                sums.append(chunk_sums(job, model, batch))
    of_chunks = [chunk for of_rank in world.gather(sums) for chunk in of_rank]
    if COUNTS:
        states = [chunk.pop() for chunk in of_chunks]
    rows, weight, losses, loss, *totals = map(math.fsum, zip(*of_chunks))
    means = {"loss": loss / weight} if losses else {}  # where there is none the criterion returns None
    if COUNTS:
        for name, metric in job.metrics.items():
            is_counted = counts_by_itself(metric)
            means[name] = merged(metric, [state[name] for state in states]) if is_counted else totals.pop(0) / rows
        return means
    return means | {name: total / rows for name, total in zip(job.metrics, totals)}


def chunks(job: Job, world: World) -> Iterator[MicroBatch]:
    """Yields this rank's chunks of the evaluation's rows. They do not depend on the number of ranks."""
    assert job.evaluation is not None
    length, at_once = len(job.evaluation), min(job.micro_batch or job.global_batch, 128)
    for first in np.array_split(np.arange(0, length, at_once), world.size)[world.rank]:
        rows = np.arange(first, min(first + at_once, length))
        weight = float(len(rows))
        if job.evaluation_weight:
            weight = float(sum(map(job.evaluation_weight, rows.tolist())))
        yield MicroBatch(rows, len(rows), weight=weight)


def sums_with_derivatives(job: Job, model: Any, batch: Batch) -> list[Any]:
    try:
        return chunk_sums(job, model, batch)
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
        with torch.enable_grad():  # the model computes a derivative itself
            return chunk_sums(job, model, batch)


def chunk_sums(job: Job, model: Any, batch: Batch) -> list[Any]:
    """Returns the rows, their weight, whether there is a loss, it times the weight, and the sum of each metric."""
    rows, weight = batch.micro_batch.rows, batch.micro_batch.weight
    output = job.output(model, batch)
    loss = job.criterion(output, batch) if weight else torch.zeros(())  # rows that all weigh 0 have no mean
    sums: list[Any] = [rows, weight, loss is not None, 0.0 if loss is None else (loss * weight).item()]
    for name, metric in job.metrics.items():
        if not COUNTS or not counts_by_itself(metric):
            values = metric(output, batch)
            if list(values.shape) != [rows]:
                raise ValueError(f"the metric {name} gave shape {list(values.shape)} for {rows} rows, not one for each")
            sums.append(values.double().sum().item())
    if COUNTS:
        metrics = {name: metric for name, metric in job.metrics.items() if counts_by_itself(metric)}
        sums.append({name: counted(metric, output, batch) for name, metric in metrics.items()})
    return sums


def counted(metric: Any, output: Any, batch: Batch) -> dict[str, Any]:
    """Returns what a metric of torchmetrics counts in one chunk, on the CPU; of another, what it is updated with."""
    if not hasattr(metric, "merge_state"):
        return {
            "given": mapped_tensors(lambda t: t.to("cpu"), (output, batch if reads_batch(metric) else batch.targets))
        }
    metric.reset()
    metric.to(output.device if isinstance(output, Tensor) else "cpu")
    metric.update(output, batch if reads_batch(metric) else batch.targets)
    state: dict[str, Any] = tree_map_only(Tensor, lambda tensor: tensor.to("cpu"), metric.metric_state)
    metric.reset()
    return state


def merged(metric: Any, states: list[dict[str, Any]]) -> float:
    """Returns the metric of all chunks, in their order."""
    metric.reset()
    if not hasattr(metric, "merge_state"):
        for state in states:
            metric.update(*state["given"])
        return float(metric.compute())
    metric.to("cpu")
    for state in reversed(states):  # a state that is merged goes before what is there
        metric.merge_state(state)
    metric.distributed_available_fn = lambda: False  # the states are of all ranks: it must not add them up again
    with warnings.catch_warnings():  # it has merged, and not been updated
        warnings.simplefilter("ignore")
        return float(metric.compute())
