"""Saves the weights on rank 0, and evaluates them on all ranks, each row once.

The rows are cut into chunks that do not depend on the number of ranks, and a chunk's sums are added in the order of
the chunks: so the figures are the same to the last digit on any number of ranks.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from samestep.data.schedule import cut
from samestep.job import Batch, Job, MicroBatch, counts_by_itself, reads_batch
from samestep.job.walk import mapped_tensors
from samestep.tasks.eject.runtime.run import World, loaded

ROWS_AT_ONCE = 128  # at most; fewer where the job's micro-batch or global batch is smaller
WEIGHTS = "weights.pt"


def finish(job: Job, state: dict[str, Any], world: World) -> None:
    """Saves rank 0's state dict; evaluates it where the job has something to evaluate on."""
    if world.rank == 0:
        torch.save({n: t.detach().cpu() if isinstance(t, Tensor) else t for n, t in state.items()}, WEIGHTS)
        print(f"wrote {WEIGHTS}", flush=True)
    if job.evaluation is None:
        return
    means = evaluate(job, state, world)
    if world.rank == 0:
        said = ", ".join(f"{name} {mean!r}" for name, mean in means.items())
        print(f"evaluation over {len(job.evaluation)} rows, each once: {said}", flush=True)


def evaluate(job: Job, state: dict[str, Any], world: World) -> dict[str, float]:
    """The mean loss and each metric of rank 0's `state` over job.evaluation. The figures are equal on every rank."""
    assert job.evaluation is not None
    model = job.model().to(world.device)
    if world.rank == 0:
        model.load_state_dict(state)
    world.broadcast(value for value in model.state_dict().values() if isinstance(value, Tensor))
    model.eval()
    whole = [name for name, metric in job.metrics.items() if counts_by_itself(metric)]  # torchmetrics' own
    by_row = [name for name in job.metrics if name not in whole]
    mine: list[tuple[list[float], dict[str, Any]]] = []  # of each chunk: its sums, and what torchmetrics counted
    with torch.no_grad():
        for batch in loaded(job.evaluated(), chunks(job, world), world.device):
            try:
                mine.append(figures(job, model, batch, by_row, whole))
            except RuntimeError as error:
                if "does not require grad" not in str(error):
                    raise
                with torch.enable_grad():  # the model computes a derivative itself
                    mine.append(figures(job, model, batch, by_row, whole))
    of_chunk = [chunk for of_rank in world.gather(mine) for chunk in of_rank]
    rows, weight, without_loss, loss, *totals = map(math.fsum, zip(*(numbers for numbers, _ in of_chunk)))
    means = {} if without_loss else {"loss": loss / weight}
    means |= {name: total / rows for name, total in zip(by_row, totals)}
    means |= {name: merged(job.metrics[name], [states[name] for _, states in of_chunk]) for name in whole}
    return {name: means[name] for name in ("loss", *job.metrics) if name in means}


def figures(
    job: Job, model: Any, batch: Batch, by_row: list[str], whole: list[str]
) -> tuple[list[float], dict[str, Any]]:
    """The sums of one chunk, and what torchmetrics count."""
    output = job.output(model, batch)
    states = {name: counted(job.metrics[name], output, batch) for name in whole}
    return sums(job, by_row, output, batch), states


def chunks(job: Job, world: World) -> list[MicroBatch]:
    """This rank's chunks of the evaluation's rows, none padded."""
    assert job.evaluation is not None
    length, at_once = len(job.evaluation), min(job.micro_batch or job.global_batch, ROWS_AT_ONCE)
    every = [np.arange(first, min(first + at_once, length)) for first in range(0, length, at_once)]
    per_rank = cut(len(every), world.size)
    first = sum(per_rank[: world.rank])
    micro_batches = []
    for rows in every[first : first + per_rank[world.rank]]:
        weight = float(sum(map(job.evaluation_weight, rows.tolist())) if job.evaluation_weight else len(rows))
        micro_batches.append(
            MicroBatch(0, 0, 0, rows, len(rows), weight, 1.0, completes_step=True, completes_epoch=False)
        )
    return micro_batches


def sums(job: Job, by_row: list[str], output: Any, batch: Batch) -> list[float]:
    """[rows, weight, 1 where the criterion returns None, loss times weight, each metric by row] of one chunk."""
    rows, weight = batch.micro_batch.rows, batch.micro_batch.weight
    loss = job.criterion(output, batch) if weight else torch.zeros(())  # rows that all weigh 0 have no mean
    found = [job.metrics[name](output, batch) for name in by_row]
    for name, values in zip(by_row, found):
        if list(values.shape) != [rows]:
            raise ValueError(f"the metric {name} gave shape {list(values.shape)} for {rows} rows; return one for each")
    total = 0.0 if loss is None else (loss * weight).item()
    return [float(rows), weight, float(loss is None), total, *(values.double().sum().item() for values in found)]


def counted(metric: Any, output: Any, batch: Batch) -> dict[str, Any]:
    """What a metric of torchmetrics counts in one chunk, on the CPU; of another, what it is updated with."""
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
    """The metric of all chunks, in their order."""
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
