"""Run, which the engine's loop trains with: this rank's batches in order, their losses, and a count of the steps."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset, default_collate

from samestep.data.loader import KeyedRandom
from samestep.data.schedule import key, schedule_of
from samestep.job import Batch, Job, MicroBatch
from samestep.job.checks import nested

CLOSURE = "an optimizer whose step needs a closure"


@dataclass(frozen=True)
class World:
    """The place of this process in the training.

    rank: this process among `size`; local_size: how many are on this machine. devices: what this process drives.
    """

    rank: int = 0
    size: int = 1
    local_size: int = 1
    devices: tuple[str, ...] = ("cpu",)

    @property
    def device(self) -> str:
        return self.devices[0]

    def gather(self, value: Any) -> list[Any]:
        """Gathers a value from each rank, in rank order, on every rank."""
        return [value]

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Copies the values of rank 0's tensors into every rank's."""


def special_parts(job: Job, size: int) -> set[str]:
    """The parts of a job on `size` ranks that take more in a step than forward, backward and an update."""
    parts = {
        "ema": job.ema,
        "carry_state": job.carry_state,
        "gather_outputs": job.gather_outputs and size > 1,
        "phases": job.phases,
        "a scheduler with every='evaluation'": job.scheduler and job.scheduler.every == "evaluation",
        CLOSURE: job.optimizer and job.optimizer.needs_closure,
    }
    return {name for name, has in parts.items() if has}


class Run:
    """One training of `job` on this rank. supports: the special_parts that it trains."""

    supports: frozenset[str] = frozenset()

    def __init__(self, job: Job, world: World) -> None:
        if absent := special_parts(job, world.size) - self.supports:
            raise SystemExit(f"this script cannot train a job with {', '.join(sorted(absent))}: train it with samestep")
        self.job, self.world = job, world
        self.schedule = schedule_of(job, world.size)
        self.steps, self.done = job.steps(self.schedule.steps_per_epoch), 0
        self.latest = torch.zeros(())

    def register(self, model: nn.Module, optimizer: Optimizer, **_: Any) -> None:
        """Called when model and optimizer are ready: the place to load a checkpoint, or to log."""

    def batches(self) -> Iterator[Batch]:
        """Yields this rank's micro-batches on its device, in the schedule's order."""
        return loaded(self.job, self.schedule.micro_batches_of(self.world.rank, self.steps), self.world.device)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Computes the mean loss over the batch's rows times its share: the ranks' average is exact when uneven."""
        micro_batch, devices = batch.micro_batch, self.world.devices
        for replica, device in enumerate(devices, self.world.rank * len(devices)):  # each replica its own dropout
            random_stream(device).manual_seed(
                key(self.job.seed, "replica", micro_batch.step, micro_batch.micro, replica)
            )
        kept = [(b, b.clone()) for b in model.buffers()] if micro_batch.rows == 0 else []
        loss, share = self.loss_and_share(model, batch)
        for buffer, value in kept:  # a rank without rows leaves no trace in BatchNorm's statistics
            buffer.data.copy_(value)
        self.latest = loss.detach()
        return loss if share == 1.0 else loss * share

    def loss_and_share(self, model: nn.Module, batch: Batch) -> tuple[Tensor, float]:
        """The mean loss over the batch's rows, and the factor by which the ranks' average of it is exact."""
        return self.job.criterion(self.job.forward(model, batch), batch), batch.micro_batch.share

    def closure(self, backward: Callable[[Batch], Tensor]) -> tuple[Callable[[], Any], ...]:
        """The arguments of the optimizer's step: none. LBFGS would be given a function that calls `backward`."""
        return ()

    def step(self, loss: Tensor, *, skipped: bool = False) -> None:
        """Called after each optimizer step. skipped: after an overflow, a GradScaler left the weights as they were."""
        self.done += 1
        if self.world.rank == 0 and (self.done % 10 == 0 or self.done == self.steps):
            print(f"step {self.done} of {self.steps}: loss {self.latest.item():.6g}", flush=True)


def random_stream(device: str) -> Generator:
    """The random stream that dropout on `device` draws from."""
    if device == "cpu":
        return torch.default_generator
    torch.cuda.init()
    return torch.cuda.default_generators[torch.device(device).index or 0]


class Fetched(Dataset[Any]):
    """The job's training data by the micro-batch: its rows, augmented and collated."""

    def __init__(self, job: Job) -> None:
        self.job, self.epoch = job, -1
        self.dataset: Any = job.train
        self.keyed = KeyedRandom()

    def __getitem__(self, micro_batch: MicroBatch) -> tuple[MicroBatch, Any]:
        if micro_batch.epoch != self.epoch:
            self.epoch = micro_batch.epoch
            set_epoch = next(filter(None, (getattr(each, "set_epoch", None) for each in nested(self.dataset))), None)
            if set_epoch:
                set_epoch(micro_batch.epoch)
        return micro_batch, self.keyed(lambda: self.collated(micro_batch))

    def collated(self, micro_batch: MicroBatch) -> Any:
        """The samples, augmented and collated. What they draw is keyed by the sample: alike on any number of ranks."""
        rows, repeats = (
            micro_batch.indices.tolist(),
            micro_batch.indices * 0 if micro_batch.repeats is None else micro_batch.repeats,
        )
        keys = [(self.epoch, row, again) if again else (self.epoch, row) for row, again in zip(rows, repeats.tolist())]
        if self.keyed.drawn or not hasattr(self.dataset, "__getitems__"):
            samples = [self.sample(path) for path in keys]
        else:
            samples = list(self.dataset.__getitems__(rows))
        if self.job.augment:
            samples = [self.augmented(*pair) for pair in zip(samples, keys, strict=True)]
        self.keyed.seed(self.job.seed, "collate", *keys[0])
        return (self.job.collate or default_collate)(samples)

    def sample(self, path: tuple[int, ...]) -> Any:
        """Reads a sample, with the random generators seeded for it.

        path: the epoch, the row, and how often it has been read before in the epoch, if it has.
        """
        self.keyed.seed(self.job.seed, "sample", *path)
        data, row = self.dataset, path[1]
        return data.__getitems__([row])[0] if hasattr(data, "__getitems__") else data[row]

    def augmented(self, sample: Any, path: tuple[int, ...]) -> Any:
        assert self.job.augment
        self.keyed.seed(self.job.seed, "augment", *path)
        return self.job.augment(sample, Generator().manual_seed(key(self.job.seed, "augment", *path)))


def as_it_is(data: Any) -> Any:
    return data


def loaded(job: Job, micro_batches: Iterable[MicroBatch], device: str) -> Iterator[Batch]:
    """The training data of `micro_batches`, on a device. The job's loader workers fetch it ahead."""
    workers = job.workers if job.shuffle else min(job.workers, 1)  # each worker would read all of a stream
    loader: Any = DataLoader(
        Fetched(job),
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
        yield Batch(on_device(data, device), micro_batch)


def on_device(data: Any, device: str) -> Any:
    """Nested data with its tensors on a device."""

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(device, non_blocking=True)
        if isinstance(leaf, UserDict) or is_dataclass(leaf):  # as Hugging Face's BatchEncoding
            leaf = copy.copy(leaf)
            vars(leaf).update(on_device({**vars(leaf)}, device))
        return leaf

    return data if device == "cpu" else tree_map(moved, data)
