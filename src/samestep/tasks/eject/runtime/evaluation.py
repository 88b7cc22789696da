"""Trains; then saves the weights on rank 0, and evaluates them on all ranks, each row once."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from samestep.job import Batch, Job, MicroBatch, counts_by_itself, reads_batch
from samestep.job.walk import mapped_tensors
from samestep.tasks.eject.runtime.job import untrained_parts
from samestep.tasks.eject.runtime.rows import loaded
from samestep.tasks.eject.runtime.run import Run
from samestep.tasks.eject.runtime.world import World


def train_and_evaluate(
    job: Job,
    train: Callable[..., dict[str, Any]],
    world: World,
    *,
    checkpoint: str = "",
    micro_batches: int = 1,
    lone_batchnorm: bool = False,
) -> None:
    """Trains, saves and evaluates. checkpoint, micro_batches: as of Run. lone_batchnorm: torch's SyncBatchNorm does not
    find the other replicas."""
    torch.set_num_threads(1)
    if parts := untrained_parts(job):
        raise SystemExit(f"a script cannot train a job with {' and '.join(sorted(parts))}; train it with samestep")
    if world.mesh and world.mesh.size != world.size:
        raise SystemExit(f"this script is for {world.mesh.size} ranks, not for {world.size}")
    trained = job
    if job.sync_batchnorm and lone_batchnorm and max(world.size, len(world.devices)) > 1:
        raise SystemExit("SyncBatchNorm does not find the other replicas of this engine; leave sync_batchnorm out")
    if job.sync_batchnorm and world.size > 1:
        trained = replace(job, model=lambda: nn.SyncBatchNorm.convert_sync_batchnorm(job.model()))
    finish(job, train(trained, world, Run(job, world, checkpoint, micro_batches)), world)


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
            sums.append(sums_with_derivatives(job, model, batch))
    of_chunks = [chunk for of_rank in world.gather(sums) for chunk in of_rank]
    states = [chunk.pop() for chunk in of_chunks]
    rows, weight, losses, loss, *totals = map(math.fsum, zip(*of_chunks))
    means = {"loss": loss / weight} if losses else {}  # where there is none the criterion returns None
    for name, metric in job.metrics.items():
        is_counted = counts_by_itself(metric)
        means[name] = merged(metric, [state[name] for state in states]) if is_counted else totals.pop(0) / rows
    return means


def chunks(job: Job, world: World) -> Iterator[MicroBatch]:
    """Yields this rank's chunks of the evaluation's rows. They do not depend on the number of ranks."""
    assert job.evaluation is not None
    length, at_once = len(job.evaluation), min(job.micro_batch or job.global_batch, 128)
    for first in np.array_split(np.arange(0, length, at_once), world.size)[world.rank]:
        rows = np.arange(first, min(first + at_once, length))
        weight = float(len(rows))
        if job.evaluation_weight:
            weight = float(sum(map(job.evaluation_weight, rows.tolist())))
        yield MicroBatch(
            epoch=0,
            step=0,
            micro=0,
            indices=rows,
            rows=len(rows),
            weight=weight,
            share=1.0,
            completes_step=True,
            completes_epoch=False,
        )


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
        if not counts_by_itself(metric):
            values = metric(output, batch)
            if list(values.shape) != [rows]:
                raise ValueError(f"the metric {name} gave shape {list(values.shape)} for {rows} rows, not one for each")
            sums.append(values.double().sum().item())
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
