"""The loader: yields a rank's batches in the schedule's order, on its device, loaded ahead of the training.

Many transforms, torchvision's among them, draw from Python's `random`, numpy's global generator or torch's default one.
What these give depends on the process and on all that was drawn before, so that another number of ranks or of loader
workers would be another training. Here each sample is read with the generators seeded by (seed, epoch, index).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset, default_collate

from samestep.data.arrays import Arrays
from samestep.data.part import Part, PartOfArrays
from samestep.data.pipeline import Pipeline, Span
from samestep.data.schedule import Schedule, key
from samestep.data.stream import Stream, is_stream
from samestep.data.workers import Fetched, failed, fetched
from samestep.errors import UserError, add_note
from samestep.job import Batch, Job, MicroBatch
from samestep.job.checks import nested
from samestep.job.walk import mapped_tensors
from samestep.message import message
from samestep.world import World
from samestep.world.heartbeat import NONE, heartbeat

Result = TypeVar("Result")


class KeyedRandom:
    """Seeds the global generators that a dataset draws from, and restores them.

    drawn: the names of those that it has drawn from so far. The others are neither seeded nor restored. Which these are
    is found by comparing all states before and after each batch.
    """

    def __init__(self) -> None:
        self.drawn: frozenset[str] = frozenset()

    def __call__(self, read: Callable[[], Result]) -> Result:
        """Returns read(), which calls seed() before each sample, and restores the generators.

        A read that is seen to draw from a generator for the first time is repeated, with this generator seeded.
        """
        while True:
            saved = {name: generator.state() for name, generator in GENERATORS.items()}
            try:
                result = read()
            finally:
                changed = {
                    name
                    for name, state in saved.items()
                    if name in self.drawn or not same_state(state, GENERATORS[name].state())
                }
                for name in changed:
                    GENERATORS[name].restore(saved[name])
            if changed <= self.drawn:
                return result
            self.drawn |= changed

    def seed(self, *path: int | str) -> None:
        """Seeds the generators in `drawn` for a path such as (seed, 'sample', epoch, index)."""
        if self.drawn:
            number = key(*path)
            for name in self.drawn:
                GENERATORS[name].seed(number)


class GlobalGenerator(NamedTuple):
    """A global random generator. restore: takes what `state` returned."""

    seed: Callable[[int], Any]
    state: Callable[[], Any]
    restore: Callable[[Any], Any]


GENERATORS: Mapping[str, GlobalGenerator] = {
    "random": GlobalGenerator(random.seed, random.getstate, random.setstate),
    "numpy": GlobalGenerator(lambda number: np.random.seed(number % 2**32), np.random.get_state, np.random.set_state),
    # The generator itself: torch.manual_seed also queues a seed for CUDA, which takes 70 µs.
    "torch": GlobalGenerator(
        lambda number: torch.default_generator.manual_seed(number),
        torch.default_generator.get_state,
        lambda state: torch.default_generator.set_state(state),
    ),
}


def same_state(first: Any, second: Any) -> bool:
    """Returns whether two states of one of these generators are the same."""
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first[1], np.ndarray):  # numpy's state: a name, the keys, and numbers
        return bool(first[2:] == second[2:] and np.array_equal(first[1], second[1]))
    return bool(first == second)


def to_device(data: Any, device: str) -> Any:
    """Returns `data` with every tensor on `device`; unchanged if that is the CPU."""
    if device == "cpu":
        return data
    return mapped_tensors(lambda tensor: tensor.to(device, non_blocking=True), data)


@dataclass(frozen=True)
class PendingCopy:
    """Data that is being copied to the GPU. copied: recorded after the copy; None where nothing is copied."""

    data: Any
    copied: torch.cuda.Event | None = None

    def wait(self) -> Any:
        """Returns the data, and makes the current CUDA stream wait for the copy. Does not block Python.

        The memory belongs to the copying stream; record_stream keeps it allocated until the current one has used it.
        """
        if self.copied is not None:
            training = torch.cuda.current_stream()
            training.wait_event(self.copied)
            mapped_tensors(lambda tensor: tensor.record_stream(training), self.data)
        return self.data


class Gather:
    """A pipeline stage that copies an item's tensors to `device` through pinned memory, on its own CUDA stream.

    On the CPU it copies nothing. Source: "CUDA semantics: use pinned memory buffers", PyTorch's notes;
    https://docs.pytorch.org/docs/stable/generated/torch.Tensor.record_stream.html
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.stream = None if device == "cpu" else torch.cuda.Stream(device)

    def __call__(self, data: Any) -> PendingCopy:
        if self.stream is None:
            return PendingCopy(data)
        # The device too: without it, pinning in a thread would open a context on GPU 0 from every rank.
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            on_gpu = mapped_tensors(self._copied, data)
            copied = torch.cuda.Event()
            copied.record(self.stream)
        return PendingCopy(on_gpu, copied)

    def _copied(self, tensor: Tensor) -> Tensor:
        # torch's pinned-memory allocator records the copy, and does not reuse the buffer until it is done.
        return (tensor if tensor.is_cuda else tensor.pin_memory()).to(self.device, non_blocking=True)


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
        self.by_take = type(self.dataset) in (Arrays, PartOfArrays) and not job.collate and not job.augment
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
            samples = len(self.dataset)
            raise UserError(message("length_of_dataset_changes", samples=samples, epoch=epoch, at_start=self.length))

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
            raise UserError(
                message("batch_of_samples_has_another_length", dataset=kind, samples=count, indices=len(indices))
            )
        return samples
    samples = []
    rows = dataset.rows if isinstance(dataset, Part) else range(len(dataset))  # as the job numbers them
    try:
        for index in indices:
            heartbeat.row(rows[index])
            samples.append(dataset[index])
    except Exception as error:
        add_note(error, f"sample {rows[indices[len(samples)]]}")
        raise
    heartbeat.row(NONE)
    return samples


def batches(
    job: Job,
    world: World,
    schedule: Schedule,
    steps: int,
    *,
    first: int = 0,
    trace: list[Span] | None = None,
    ahead: bool = True,
) -> Iterator[Batch]:
    """Yields this rank's batches of the first `steps` steps, on its device, in the schedule's order.

    first: the step to begin with, where a training continues. trace: a list to which the pipeline's stages append their
    spans. ahead: see loaded(). Raises a UserError of the dataset unchanged, and LoadingFailed for its other errors and
    for a loader process that dies.
    """
    from_batch = first - first % schedule.phases  # the first phase's step with the rows of step `first`
    micro_batches = schedule.micro_batches_of(world.replica, steps, from_batch)
    if schedule.phases == 1:
        return loaded(job, micro_batches, world.device, trace=trace, ahead=ahead)
    once = (
        micro_batch
        for micro_batch in schedule.micro_batches_of(world.replica, steps, from_batch)
        if micro_batch.phase == 0
    )
    in_turn = _in_turn(loaded(job, once, world.device, trace=trace, ahead=ahead), micro_batches)
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
    job: Job, micro_batches: Iterable[MicroBatch], device: str, *, trace: list[Span] | None = None, ahead: bool = True
) -> Iterator[Batch]:
    """Yields a batch of job.train for each of `micro_batches`, on `device`. See batches() for trace and errors.

    ahead: False: without loader processes nothing is loaded before it is asked for. A dataset draws from the process's
    generators, which other ranks may use meanwhile where ranks are threads.
    """
    rows, workers = Rows(job), workers_of(job)
    if workers == 0 and (device == "cpu" or not ahead):  # on a CPU there is nothing that a thread could overlap
        for micro_batch in micro_batches:
            yield Batch(to_device(_data(rows, micro_batch), device), micro_batch)
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
