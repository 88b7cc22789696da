"""The batches of a TensorDataset of two tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from samestep.job import Job
from samestep.tasks.eject.runtime.micro_batch import MicroBatch


@dataclass(frozen=True)
class Batch:
    """The rows of one micro-batch on one rank, on its device."""

    inputs: Any
    targets: Any
    micro_batch: MicroBatch

    @property
    def completes_step(self) -> bool:
        return self.micro_batch.completes_step

    @property
    def completes_epoch(self) -> bool:
        return self.micro_batch.completes_epoch


def loaded(job: Job, micro_batches: Iterable[MicroBatch], device: str, *, evaluates: bool = False) -> Iterator[Batch]:
    """Yields the rows of each micro-batch on a device, of the training data or of the evaluation's."""
    dataset: Any = job.evaluation if evaluates else job.train
    for micro_batch in micro_batches:
        inputs, targets = (tensor[micro_batch.indices].to(device) for tensor in dataset.tensors)
        yield Batch(inputs, targets, micro_batch)
