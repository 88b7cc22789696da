"""Reads the reference's rows one by one, collates them, and digests each row's tensors."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samestep.job import Batch, Job, MicroBatch
from samestep.job.walk import items_of, leaves_of, mapped_tensors, text_of, with_items
from samestep.reference.schedule import RepeatedRow, seeded, weight
from samestep.reference.streams import with_reader


def fetch(job: Job, rows: list[int], epoch: int, device: str) -> Any:
    """The collated training samples at `rows`; None where there are none."""
    begin_epoch(job.train, epoch)
    with generators_kept():
        samples = read(job, job.train, rows, epoch)
        for position, row in enumerate(rows if job.augment else []):
            path: list[int | str] = [job.seed, "augment", epoch, *_place(row)]
            seed_all(*path)
            samples[position] = job.augment(samples[position], seeded(*path))  # type: ignore[misc]
        return collate(job, samples, device, epoch, rows[0]) if samples else None


class StepRows:
    """The rows of one step, collated at once, so that each row is what it is in one process although collate draws.

    misfit: whether what collate returned holds no tensor or list with a place for each row.
    """

    def __init__(self, job: Job, rows: list[int], epoch: int, device: str) -> None:
        self.data = fetch(job, rows, epoch, device)
        self.places = {_place(row): place for place, row in enumerate(rows)}
        self.misfit = False

    def of(self, rows: list[int]) -> Any:
        """The part of these rows; None where there are none."""
        self.misfit = True
        return self._part(self.data, [self.places[_place(row)] for row in rows]) if rows else None

    def _part(self, value: Any, places: list[int]) -> Any:
        count = len(self.places)
        if isinstance(value, Tensor):
            fits = [dimension for dimension, size in enumerate(value.shape) if size == count]
            if not fits or (fits[0] and len(fits) > 1):
                return value
            self.misfit = False
            return value.index_select(fits[0], torch.tensor(places, device=value.device))
        items = items_of(value)
        if items is None:
            return value
        of_rows = any(isinstance(leaf, Tensor) and count in leaf.shape for leaf in leaves_of(value))
        if isinstance(value, list | tuple) and len(value) == count and not of_rows:
            self.misfit = False
            return type(value)(value[place] for place in places)
        return with_items(value, {key: self._part(item, places) for key, item in items.items()})


def weight_of_batch(job: Job, rows: list[int], data: Any, epoch: int, step: int) -> float:
    """What collated rows weigh in the mean: by their indices, or as the batch itself says. Without rows: 0."""
    if job.batch_weight is None or not rows:
        return weight(job, rows)
    return float(job.batch_weight(Batch(data, place(step, 0, rows, epoch))))


def row_keys(rows: list[int]) -> list[int]:
    """A number for each row, by which its random numbers are drawn."""
    return [seeded("row", *_place(row)).initial_seed() for row in rows]


def read(job: Job, dataset: Any, rows: list[int], epoch: int) -> list[Any]:
    """The samples at `rows`, each read with the global random numbers of (seed, epoch, row), which stay seeded."""
    dataset, reader = with_reader(dataset)
    if reader is not None:
        reader.key_rows((job.seed, epoch), lambda row: seed_all(job.seed, "sample", epoch, row))
    samples: dict[int, Any] = {}
    for position in sorted(
        range(len(rows)), key=lambda position: rows[position]
    ):  # in the order in which a stream has them
        seed_all(job.seed, "sample", epoch, *_place(rows[position]))
        samples[position] = dataset[int(rows[position])]
    return [samples[position] for position in range(len(rows))]


def _place(row: int) -> tuple[int, ...]:
    """A row, and how often it has come before in the epoch where it has."""
    return (int(row), row.times) if isinstance(row, RepeatedRow) else (row,)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restores the states of Python's, numpy's and torch's global generators after the block. Reading them takes longer
    than seeding, so this is for a batch, not for a sample."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def seed_all(*path: int | str) -> None:
    """Seeds these generators for a path such as (seed, 'sample', epoch, row)."""
    number = seeded(*path).initial_seed()
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)
    torch.default_generator.manual_seed(number)


def begin_epoch(dataset: Any, epoch: int) -> None:
    """Calls the dataset's set_epoch, or that of the dataset inside of subsets, where there is one."""
    dataset, _ = with_reader(dataset)
    while dataset is not None and not hasattr(dataset, "set_epoch"):
        dataset = getattr(dataset, "dataset", None)
    if dataset is not None:
        dataset.set_epoch(epoch)


def collate(job: Job, samples: list[Any], device: str, epoch: int, first: int) -> Any:
    """The samples as one batch on `device`. first: its first row, which keys what collate draws; the global generators
    stay seeded."""
    seed_all(job.seed, "collate", epoch, *_place(first))
    data = (job.collate or torch.utils.data.default_collate)(samples)
    return mapped_tensors(lambda t: t.to(device), data)


def collate_draws(job: Job, dataset: Any) -> bool:
    """Whether the job's collate draws from a global generator: its result then depends on which rows it is given."""
    with generators_kept():
        samples = read(job, dataset, list(range(min(4, len(dataset)))), 0)  # a permutation of one row draws nothing
        seed_all("collate")
        before = _states()
        (job.collate or torch.utils.data.default_collate)(samples)
        return _states() != before


def _states() -> tuple[Any, ...]:
    numpys: Any = np.random.get_state()
    return random.getstate(), numpys[1].tolist(), numpys[2:], torch.get_rng_state().tolist()


def place(
    step: int, micro: int, rows: list[int], epoch: int = 0, weight: float | None = None, phase: int = 0
) -> MicroBatch:
    """The `Batch.micro_batch` of `rows`, for a criterion that reads it."""
    return MicroBatch(
        epoch=epoch,
        step=step,
        micro=micro,
        indices=torch.tensor(rows, dtype=torch.int64).numpy(),
        rows=len(rows),
        weight=float(len(rows)) if weight is None else weight,
        share=1.0,
        completes_step=True,
        completes_epoch=False,
        phase=phase,
    )


def digests(data: Any, rows: int) -> list[str]:
    """A digest of each row, from the bytes of its tensors in the batch's order.

    What has no first dimension of rows (a time-first sequence, a table, a text) counts whole in each row's digest.
    """
    out = []
    for row in range(rows):
        state = hashlib.blake2b(digest_size=6)
        for leaf in leaves_of(data):
            if isinstance(leaf, Tensor):
                tensor = leaf[row] if leaf.dim() and len(leaf) == rows else leaf
                flat = tensor.cpu().contiguous().reshape(-1)
                # One element may have a stride of 0.
                state.update(flat.as_strided(flat.shape, (1,)).view(torch.uint8).numpy().tobytes())
            else:
                state.update(text_of(leaf).encode())
        out.append(state.hexdigest())
    return out


def seed(device: str, *path: int | str) -> None:
    """Seeds the generator that dropout on `device` draws from, for a path such as (seed, 'replica', step)."""
    number = seeded(*path).initial_seed()
    if device == "cpu":
        torch.default_generator.manual_seed(number)  # torch.manual_seed queues a seed for each kind of GPU, too
    else:
        torch.manual_seed(number)


def random_state(device: str) -> Tensor:
    """The state of the random generator that dropout on `device` draws from."""
    return torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state(device)
