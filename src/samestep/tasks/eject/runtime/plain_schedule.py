"""Schedule: which rows each rank trains on in each step. A step has the same rows on any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from samestep.data.schedule import key
from samestep.job import Job
from samestep.tasks.eject.runtime.micro_batch import MicroBatch

FEWEST = 1  # micro-batches of a step on each replica


@dataclass(frozen=True)
class Schedule:
    """Which rows of `job.train` each of `world_size` ranks trains on in each step, each row once in an epoch."""

    job: Job
    world_size: int

    @property
    def steps_per_epoch(self) -> int:
        if self.job.last == "drop":
            return len(self.job.train) // self.job.global_batch
        return math.ceil(len(self.job.train) / self.job.global_batch)

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches in a step, the same on every rank."""
        if self.job.micro_batch is None:
            return FEWEST
        return max(FEWEST, math.ceil(math.ceil(self.job.global_batch / self.world_size) / self.job.micro_batch))

    def micro_batches_of(self, rank: int, steps: int, first: int = 0) -> Iterator[MicroBatch]:
        """Yields the rank's micro-batches of the steps from `first` on."""
        for step in range(first, steps):
            epoch, number = divmod(step, self.steps_per_epoch)
            if not self.job.shuffle:
                order = np.arange(len(self.job.train))
            elif step == first or number == 0:
                generator = torch.Generator().manual_seed(key(self.job.seed, "order", epoch))
                order = torch.randperm(len(self.job.train), generator=generator).numpy()
            batch = order[number * self.job.global_batch : (number + 1) * self.job.global_batch]
            of_rank = np.array_split(batch, self.world_size)[rank]
            for micro, rows in enumerate(np.array_split(of_rank, self.micro_batches)):
                yield MicroBatch(
                    epoch=epoch,
                    step=step,
                    micro=micro,
                    # A rank without rows computes others' with a share of 0: two, the fewest that BatchNorm accepts.
                    indices=rows if len(rows) else np.resize(batch, 2),
                    rows=len(rows),
                    weight=float(len(rows)),
                    share=len(rows) * self.world_size / len(batch),
                    completes_step=micro == self.micro_batches - 1,
                    completes_epoch=micro == self.micro_batches - 1 and number == self.steps_per_epoch - 1,
                )
