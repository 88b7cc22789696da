"""The batches of any dataset, which the job's loader workers fetch ahead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Generator
from torch.utils.data import DataLoader, TensorDataset, default_collate

from samestep.data.loader import KeyedRandom, to_device
from samestep.data.schedule import key
from samestep.job import Batch, Job, MicroBatch
from samestep.job.checks import nested


class Fetched:
    """The job's data by the micro-batch: its rows, augmented and collated."""

    def __init__(self, job: Job, evaluates: bool) -> None:
        self.job, self.epoch = job, -1
        self.dataset: Any = job.evaluation if evaluates else job.train
        self.collate = job.collate
        if evaluates and job.evaluation_collate:
            self.collate = job.evaluation_collate
        self.augment = None if evaluates else job.augment
        self.keyed = KeyedRandom()

    @property
    def by_array(self) -> bool:
        """Whether one indexing gives the same tensors as collating row by row."""
        return type(self.dataset) is TensorDataset and not self.augment and not self.collate

    def __getitem__(self, micro_batch: MicroBatch) -> tuple[MicroBatch, Any]:
        if micro_batch.epoch != self.epoch:
            self.epoch = micro_batch.epoch
            for dataset in nested(self.dataset):
                if hasattr(dataset, "set_epoch"):
                    dataset.set_epoch(micro_batch.epoch)
                    break
        if self.by_array:
            rows = torch.from_numpy(micro_batch.indices)
            return micro_batch, [tensor.index_select(0, rows) for tensor in self.dataset.tensors]
        return micro_batch, self.keyed(lambda: self.collated(micro_batch))

    def collated(self, micro_batch: MicroBatch) -> Any:
        """The samples, augmented and collated. What they draw is keyed by the sample: alike on any number of ranks."""
        rows = micro_batch.indices.tolist()
        keys: list[tuple[int, ...]] = [(self.epoch, row) for row in rows]
        if micro_batch.repeats is not None:  # how often a row has come before in the epoch
            keys = [(*path, before) if before else path for path, before in zip(keys, micro_batch.repeats.tolist())]
        if self.keyed.drawn or not hasattr(self.dataset, "__getitems__"):
            samples = [self.sample(path) for path in keys]
        else:
            samples = list(self.dataset.__getitems__(rows))
        if self.augment:
            samples = [self.augmented(*pair) for pair in zip(samples, keys, strict=True)]
        self.keyed.seed(self.job.seed, "collate", *keys[0])
        return (self.collate or default_collate)(samples)

    def sample(self, path: tuple[int, ...]) -> Any:
        """Reads a sample, with the random generators seeded for it. path: the epoch and the row."""
        self.keyed.seed(self.job.seed, "sample", *path)
        data, row = self.dataset, path[1]
        return data.__getitems__([row])[0] if hasattr(data, "__getitems__") else data[row]

    def augmented(self, sample: Any, path: tuple[int, ...]) -> Any:
        assert self.augment
        self.keyed.seed(self.job.seed, "augment", *path)
        return self.augment(sample, Generator().manual_seed(key(self.job.seed, "augment", *path)))


def as_it_is(data: Any) -> Any:
    return data


def loaded(job: Job, micro_batches: Iterable[MicroBatch], device: str, *, evaluates: bool = False) -> Iterator[Batch]:
    """Yields the rows of each micro-batch on a device, of the training data or of the evaluation's."""
    rows = Fetched(job, evaluates)
    workers = job.workers if job.shuffle else min(job.workers, 1)  # each worker would read all of a stream
    workers = 0 if rows.by_array else workers
    dataset: Any = rows
    loader = DataLoader(
        dataset,
        sampler=micro_batches,
        batch_size=None,  # a micro-batch is fetched and collated whole
        collate_fn=as_it_is,
        num_workers=workers,
        prefetch_factor=job.prefetch if workers else None,
        multiprocessing_context="fork" if workers else None,  # others cannot take a job's lambdas
        pin_memory=device != "cpu",
        generator=Generator(),  # its own: starting workers must not draw from the training's stream
    )
    for micro_batch, data in loader:
        yield Batch(to_device(data, device), micro_batch)
