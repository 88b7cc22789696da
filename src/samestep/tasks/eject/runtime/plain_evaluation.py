"""Saves the weights on rank 0, and evaluates them on all ranks, each row once."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samestep.job import Job
from samestep.tasks.eject.runtime.loaded_rows import loaded
from samestep.tasks.eject.runtime.micro_batch import MicroBatch
from samestep.tasks.eject.runtime.world import World


def finish(job: Job, state: dict[str, Any], world: World) -> None:
    """Saves rank 0's state dict, and prints its mean loss and metrics, the same figures on any number of ranks."""
    if world.rank == 0:
        torch.save({n: t.detach().cpu() if isinstance(t, Tensor) else t for n, t in state.items()}, "weights.pt")
    if job.evaluation is not None:
        model = job.model().to(world.device).eval()
        if world.rank == 0:
            model.load_state_dict(state)
        world.broadcast(value for value in model.state_dict().values() if isinstance(value, Tensor))
        # The sums of chunks, which do not depend on the number of ranks, are added in one order.
        length, at_once = len(job.evaluation), min(job.micro_batch or job.global_batch, 128)
        starts = np.array_split(np.arange(0, length, at_once), world.size)[world.rank]
        chunks = [np.arange(start, min(start + at_once, length)) for start in starts]
        sums = []
        with torch.no_grad():
            for batch in loaded(job, [MicroBatch(rows, len(rows)) for rows in chunks], world.device, evaluates=True):
                rows, output = batch.micro_batch.rows, job.forward(model, batch)
                loss = job.criterion(output, batch)
                values = [metric(output, batch) for metric in job.metrics.values()]
                if any(list(value.shape) != [rows] for value in values):
                    raise ValueError(f"a metric gave shapes {[list(value.shape) for value in values]} for {rows} rows")
                sums.append([rows, (loss * rows).item(), *(value.double().sum().item() for value in values)])
        total, *sums_of_all = map(math.fsum, zip(*(chunk for of_rank in world.gather(sums) for chunk in of_rank)))
        if world.rank == 0:
            names = ("loss", *job.metrics)
            means = ", ".join(f"{name} {value / total!r}" for name, value in zip(names, sums_of_all))
            print(f"evaluation over {length} rows, each once: {means}", flush=True)
