"""The loader: yields a rank's batches in the schedule's order, on its device, loaded ahead of the training."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import Dataset, TensorDataset, default_collate

from samestep.data.arrays import Arrays
from samestep.data.keyed_random import KeyedRandom
from samestep.data.pipeline import Pipeline, Span
from samestep.data.schedule import Schedule, key
from samestep.data.stream import Stream, is_stream
from samestep.data.to_device import Gather, to_device
from samestep.data.workers import Fetched, failed, fetched
from samestep.errors import UserError, add_note
from samestep.job import Batch, Job, MicroBatch
from samestep.job.checks import nested
from samestep.world import World
from samestep.world.heartbeat import NONE, heartbeat

__all__ = ["Rows", "batches", "fetch", "loaded", "most_workers", "to_device", "workers_of"]

UNLIMITED = 1_000


class Rows(Dataset[Any]):
    """A job's dataset, indexed by MicroBatch: rows[micro_batch] returns (micro_batch, the collated data of its rows).

    The micro-batch comes with the data because loaders run ahead of the training.
    """

    def __init__(self, job: Job) -> None:
        # Not the job itself: loader processes that are not forked must be able to pickle this object.
        self.dataset: Any = job.train
        self.length = len(self.dataset)
        self.seed, self.augment, self.collate = job.seed, job.augment, job.collate or default_collate
        self.by_array = type(self.dataset) is TensorDataset and not job.collate and not job.augment
        self.by_take = type(self.dataset) is Arrays and not job.collate and not job.augment
        methods = (getattr(dataset, "set_epoch", None) for dataset in nested(self.dataset))
        self.set_epoch: Callable[[int], None] | None = next(filter(None, methods), None)
        self.epoch = -1  # the latest that set_epoch was called with
        self.generator = torch.Generator()  # shared by all samples: creating one costs as much as a small augmentation
        self.keyed = KeyedRandom()
        self.stream = next((dataset for dataset in nested(self.dataset) if isinstance(dataset, Stream)), None)
        self.stream_keyed_by: tuple[int, frozenset[str]] = (-1, frozenset())  # the epoch, and the generators

    def __getitem__(self, micro_batch: MicroBatch) -> tuple[MicroBatch, Any]:
        if micro_batch.epoch != self.epoch:
            self._begin(micro_batch.epoch)
        if self.by_array:  # one indexing gives the same tensors as collating row by row
            indices = torch.from_numpy(micro_batch.indices)
            return micro_batch, [tensor.index_select(0, indices) for tensor in self.dataset.tensors]
        if self.by_take:
            return micro_batch, self.dataset.take(micro_batch.indices)
        return micro_batch, self.keyed(lambda: self._collated(micro_batch.indices.tolist(), _repeats(micro_batch)))

    def _begin(self, epoch: int) -> None:
        self.epoch = epoch
        if self.set_epoch:
            self.set_epoch(epoch)
        if len(self.dataset) != self.length:
            raise UserError(
                f"the training's dataset has {len(self.dataset)} samples in epoch {epoch}, and had {self.length} when "
                "the training began; its length must not change between epochs, because the schedule is built from it"
            )

    def _collated(self, indices: list[int], again: list[tuple[int, ...]]) -> Any:
        """Reads, augments and collates samples. The global generators that they draw from are keyed, each sample's."""
        if self.keyed.drawn and self.stream is None:
            samples = [self._read(*pair) for pair in zip(indices, again)]
        else:
            self._key_stream()
            samples = fetch(self.dataset, indices)
        if self.augment:
            samples = [self._augmented(*sample) for sample in zip(samples, indices, again)]
        self.keyed.seed(self.seed, "collate", self.epoch, indices[0], *again[0])
        return self.collate(samples)

    def _read(self, index: int, again: tuple[int, ...]) -> Any:
        self.keyed.seed(self.seed, "sample", self.epoch, index, *again)
        return fetch(self.dataset, [index])[0]

    def _key_stream(self) -> None:
        """Keys a stream's rows, which it reads one after the other, by their place in it."""
        keyed_by = (self.epoch, self.keyed.drawn)
        if self.stream is not None and self.keyed.drawn and keyed_by != self.stream_keyed_by:
            self.stream_keyed_by, epoch = keyed_by, self.epoch
            self.stream.key_rows(lambda row: self.keyed.seed(self.seed, "sample", epoch, row))

    def _augmented(self, sample: Any, index: int, again: tuple[int, ...]) -> Any:
        """Augments a sample, seeded by (seed, epoch, index): the same on any number of ranks and loader workers."""
        assert self.augment
        path: tuple[int | str, ...] = (self.seed, "augment", self.epoch, index, *again)
        self.keyed.seed(*path)
        try:
            return self.augment(sample, self.generator.manual_seed(key(*path)))
        except Exception as error:
            add_note(error, f"sample {index}")
            raise


def _repeats(micro_batch: MicroBatch) -> list[tuple[int, ...]]:
    """Returns, for each row, what is appended to its random key: how often it has come before in this epoch, if it
    has."""
    if micro_batch.repeats is None:
        return [()] * len(micro_batch.indices)
    return [(count,) if count else () for count in micro_batch.repeats.tolist()]


def fetch(dataset: Any, indices: list[int]) -> list[Any]:
    """Returns the samples at `indices`, in one call of `__getitems__` if the dataset has it.

    An error of the dataset gets a note with its sample's index. Raises UserError for a wrong number of samples.
    """
    if hasattr(dataset, "__getitems__"):
        heartbeat.row(indices[0])
        samples: list[Any] = list(dataset.__getitems__(indices))
        heartbeat.row(NONE)
        if len(samples) != len(indices):
            kind, count = type(dataset).__name__, len(samples)
            raise UserError(f"{kind}.__getitems__ gave {count} samples for {len(indices)} indices; give one for each")
        return samples
    samples = []
    try:
        for index in indices:
            heartbeat.row(index)
            samples.append(dataset[index])
    except Exception as error:
        add_note(error, f"sample {indices[len(samples)]}")
        raise
    heartbeat.row(NONE)
    return samples


def batches(
    job: Job, world: World, schedule: Schedule, steps: int, *, first: int = 0, trace: list[Span] | None = None
) -> Iterator[Batch]:
    """Yields this rank's batches of the first `steps` steps, on its device, in the schedule's order.

    first: the step to begin with, where a training continues. trace: a list to which the pipeline's stages append their
    spans. Raises a UserError of the dataset unchanged, and LoadingFailed for its other errors and for a loader process
    that dies.
    """
    from_batch = first - first % schedule.phases  # the first phase's step with the rows of step `first`
    micro_batches = schedule.micro_batches_of(world.rank, steps, from_batch)
    if schedule.phases == 1:
        return loaded(job, micro_batches, world.device, trace=trace)
    once = (
        micro_batch
        for micro_batch in schedule.micro_batches_of(world.rank, steps, from_batch)
        if micro_batch.phase == 0
    )
    in_turn = _in_turn(loaded(job, once, world.device, trace=trace), micro_batches)
    return (batch for batch in in_turn if batch.micro_batch.step >= first)


def _in_turn(loaded_once: Iterator[Batch], micro_batches: Iterable[MicroBatch]) -> Iterator[Batch]:
    """Yields a batch for each micro-batch. Those of the first phase are loaded, and kept for the phases after it."""
    loaded_batches: dict[int, Batch] = {}  # by micro-batch
    for micro_batch in micro_batches:
        if micro_batch.phase == 0:
            loaded_batches[micro_batch.micro] = next(loaded_once)
            yield loaded_batches[micro_batch.micro]
        else:
            before = loaded_batches[micro_batch.micro]
            yield replace(
                before, micro_batch=micro_batch, fetch_s=None if before.fetch_s is None else 0.0, fetch_cpu_s=0.0
            )


def most_workers(job: Job) -> int:
    """Returns the largest number of loader processes that helps with a job's training data."""
    if Rows(job).by_array:
        return 0  # indexing takes less time than sending the result from another process
    return 1 if is_stream(job.train) else UNLIMITED  # each worker would read the whole stream


def workers_of(job: Job) -> int:
    """Returns how many loader processes a rank starts: job.workers, at most most_workers(job)."""
    return min(job.workers, most_workers(job))


def loaded(
    job: Job, micro_batches: Iterable[MicroBatch], device: str, *, trace: list[Span] | None = None
) -> Iterator[Batch]:
    """Yields a batch of job.train for each of `micro_batches`, on `device`. See batches() for trace and errors."""
    rows, workers = Rows(job), workers_of(job)
    if workers == 0 and device == "cpu":  # there is nothing that a thread could overlap
        for micro_batch in micro_batches:
            yield Batch(_data(rows, micro_batch), micro_batch)
        return
    source = fetched(rows, micro_batches, workers, job.prefetch) if workers else _fetched_here(rows, micro_batches)
    gather = Gather(device)

    def gathered(item: Fetched) -> Fetched:
        return item._replace(data=gather(item.data))

    stages = {} if device == "cpu" else {"gather": gathered}
    for micro_batch, data, seconds, cpu_s in Pipeline(source, stages, depth=job.prefetch, trace=trace):
        yield Batch(data.wait() if stages else data, micro_batch, seconds, cpu_s)


def _fetched_here(rows: Rows, micro_batches: Iterable[MicroBatch]) -> Iterator[Fetched]:
    """Loads `micro_batches` in this process; the pipeline runs it in a thread."""
    for micro_batch in micro_batches:
        start, worked = time.perf_counter(), time.thread_time()
        data = _data(rows, micro_batch)
        yield Fetched(micro_batch, data, time.perf_counter() - start, time.thread_time() - worked)


def _data(rows: Rows, micro_batch: MicroBatch) -> Any:
    try:
        return rows[micro_batch][1]
    except UserError:
        raise
    except Exception as error:
        raise failed(error, micro_batch) from error
