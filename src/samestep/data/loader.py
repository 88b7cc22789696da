"""The loader: fetches a rank's parts in order, with torch's DataLoader, and puts them on the device."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing import get_all_start_methods
from typing import Any

import torch
from torch.utils._pytree import tree_map_only  # torch's own walk through tuples, lists and dicts of tensors
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from samestep.data.schedule import Schedule, key
from samestep.job import Batch, Job, Part
from samestep.lifeline import die_with_parent
from samestep.world import World


class Rows(Dataset[Any]):
    """A job's dataset, fetched by the part: one call gives the collated data of all its rows, and the part with it,
    because loaders run ahead of the training."""

    def __init__(self, job: Job) -> None:
        # Not the job itself: loader processes that are not forked must be able to pickle what they get.
        self.dataset: Any = job.train
        self.seed, self.augment, self.collate = job.seed, job.augment, job.collate or default_collate
        self.by_array = type(self.dataset) is TensorDataset and not job.collate and not job.augment

    def __getitem__(self, part: Part) -> tuple[Part, Any]:
        if self.by_array:  # the same tensors that collating the rows one by one would give, in one indexing
            indices = torch.from_numpy(part.indices)
            return part, [tensor.index_select(0, indices) for tensor in self.dataset.tensors]
        samples = fetch(self.dataset, part.indices.tolist())
        if self.augment:
            # Keyed by the sample, so that an image is cropped alike on any number of ranks and loader workers.
            keys = [key(self.seed, "augment", part.epoch, index) for index in part.indices.tolist()]
            samples = [self.augment(s, torch.Generator().manual_seed(k)) for s, k in zip(samples, keys)]
        return part, self.collate(samples)


def fetch(dataset: Any, indices: list[int]) -> list[Any]:
    """The samples at `indices`, by the batch where the dataset has torch's `__getitems__`."""
    if hasattr(dataset, "__getitems__"):
        samples: list[Any] = dataset.__getitems__(indices)
        return samples
    return [dataset[i] for i in indices]


def to_device(data: Any, device: str) -> Any:
    """`data` with every tensor on `device`; it is returned as it is when that is the CPU."""
    if device == "cpu":
        return data
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, non_blocking=True), data)


def batches(job: Job, world: World, schedule: Schedule, steps: int) -> Iterator[Batch]:
    """This rank's batches of the first `steps` steps, on its device, in the schedule's order."""
    rows = Rows(job)
    if job.workers == 0 and world.device == "cpu":  # nothing for a DataLoader to do but cost 13 µs a batch
        for part in schedule.parts(world.rank, steps):
            yield Batch(rows[part][1], part)
        return
    loader = DataLoader(
        rows,
        sampler=_Parts(schedule, world.rank, steps),
        batch_size=None,  # a part is fetched and collated whole, by Rows
        num_workers=job.workers,
        # Under torch.multiprocessing.spawn the default would be 'spawn', which cannot take a job's lambdas.
        multiprocessing_context="fork" if job.workers and "fork" in get_all_start_methods() else None,
        worker_init_fn=die_with_parent if job.workers else None,
        pin_memory=world.device != "cpu",
        generator=torch.Generator(),  # its own: starting a loader must not draw from the training's stream
    )
    for part, data in loader:
        yield Batch(to_device(data, world.device), part)


class _Parts(torch.utils.data.Sampler[Any]):
    """The schedule as a torch sampler whose 'indices' are parts."""

    def __init__(self, schedule: Schedule, rank: int, steps: int) -> None:
        self.schedule, self.rank, self.steps = schedule, rank, steps

    def __iter__(self) -> Iterator[Part]:
        return self.schedule.parts(self.rank, self.steps)
