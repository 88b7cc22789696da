"""Schedule: which replica trains on which sample at which step. A pure function of the job's numbers, without I/O.

Global batch t is the same set of samples for every world size. In an epoch each sample comes once. A step has the same
number of micro-batches on every replica. The low replicas get the remainders, so replica 0 always has rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from samestep.errors import UserError
from samestep.job import ByLength, Job, Lanes, MicroBatch, Weighted

FILL_ROWS = 2  # of the dummy batch, with weight 0, of a rank without rows: the fewest that BatchNorm accepts


def key(*parts: int | str) -> int:
    """Returns a 63-bit seed for a path such as (seed, 'order', epoch). Different paths give independent streams."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


@lru_cache(maxsize=64)
def cut(rows: int, parts: int) -> tuple[int, ...]:
    """Returns the sizes of `parts` parts of `rows` rows, as even as possible, larger first: cut(7, 3) = (3, 2, 2)."""
    base, extra = divmod(rows, parts)
    return tuple(base + (i < extra) for i in range(parts))


@dataclass(frozen=True)
class Schedule:
    """The schedule of one training."""

    length: int
    """Rows of an epoch: the samples in the dataset, unless `ordered` says another number."""

    global_batch: int
    """Rows of one step over all replicas."""

    world_size: int = 1
    """The number of replicas."""

    seed: int = 0
    """The seed of the order of each epoch."""

    micro_batch: int | None = None
    """The most rows of a micro-batch on one replica. None: no limit."""

    last: Literal["keep", "drop"] = "keep"
    """Whether to keep or drop an incomplete last batch."""

    weight: Callable[[int], float] | None = None
    """Returns the weight of a sample, by its index. None: each sample has weight 1."""

    shuffle: bool = True
    """False keeps the dataset's order in every epoch."""

    ordered: Ordered | None = None
    """The order of an epoch, where the job has its own. None: it has none."""

    phases: int = 1
    """How many steps each batch is trained for, one of each phase."""

    played: tuple[int, ...] = ()
    """The steps that are trained in turn, as in a proof of late epochs. Empty: all from the first on."""

    fewest: int = 1
    """The fewest micro-batches of a step, as Layout.micro_batches."""

    @property
    def steps_per_epoch(self) -> int:
        full, remainder = divmod(self.length, self.global_batch)
        return (full + (1 if remainder and self.last == "keep" else 0)) * self.phases

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches in a step, the same on every rank."""
        most = ceil(self.global_batch / self.world_size)
        return max(self.fewest, ceil(most / self.micro_batch) if self.micro_batch else 1)

    def order(self, epoch: int) -> NDArray[np.integer[Any]]:
        """Returns the samples' indices in the order of this epoch, the same on every rank. shape [length]"""
        if self.ordered:
            return self.ordered.indices(self.length, self.global_batch, self.seed, epoch)
        return _order(self.length, self.seed, epoch) if self.shuffle else np.arange(self.length)

    def _global_batch(self, epoch: int, number: int) -> NDArray[np.int64]:
        start, end = number * self.global_batch, min((number + 1) * self.global_batch, self.length)
        # Without an array of the whole epoch where it is not shuffled: a stream may be very long.
        rows = self.order(epoch)[start:end] if self.shuffle else np.arange(start, end)
        return rows.astype(np.int64)

    def step(self, replica: int, epoch: int, number: int) -> list[MicroBatch]:
        """Returns the replica's micro-batches of step `number` of `epoch`, in order.

        Raises UserError when the weights of the step's rows add up to 0.
        """
        batch, phase = divmod(number, self.phases)
        step_rows = self._global_batch(epoch, batch)
        per_replica = cut(len(step_rows), self.world_size)
        first = sum(per_replica[:replica])
        replica_rows = step_rows[first : first + per_replica[replica]]
        total = self._weigh(step_rows)
        if not total > 0:
            raise UserError(f"the weights of the rows of step {number} add up to {total}; a mean needs more than 0")
        repeats = self.ordered.repeats(self.global_batch, self.seed, epoch) if self.ordered else None
        micro_batches, start = [], 0
        for micro, rows in enumerate(cut(len(replica_rows), self.micro_batches)):
            indices = replica_rows[start : start + rows]
            place = batch * self.global_batch + first + start
            start += rows
            weight = self._weigh(indices)
            last = micro == self.micro_batches - 1
            micro_batches.append(
                MicroBatch(
                    epoch=epoch,
                    step=epoch * self.steps_per_epoch + number,
                    micro=micro,
                    indices=indices if rows else np.resize(step_rows, FILL_ROWS),
                    rows=rows,
                    weight=weight,
                    share=weight * self.world_size / total,
                    completes_step=last,
                    completes_epoch=last and number == self.steps_per_epoch - 1,
                    repeats=repeats[place : place + rows] if repeats is not None and rows else None,
                    phase=phase,
                )
            )
        return micro_batches

    def rows_of(self, steps: int) -> int:
        """Returns how many rows the first `steps` steps train on, over all ranks; each phase's step counts them."""
        epochs, more = divmod(steps, self.steps_per_epoch)
        of_epoch = min(self.length * self.phases, self.steps_per_epoch * self.global_batch)
        return epochs * of_epoch + more * self.global_batch

    def micro_batches_of(self, replica: int, steps: int, first: int = 0) -> Iterator[MicroBatch]:
        """Yields the replica's micro-batches of the steps from `first` on, of the first `steps` steps."""
        for step in range(first, steps):
            micro_batches = self.step(replica, *self.place_of(step))
            yield from (replace(part, step=step) for part in micro_batches) if self.played else micro_batches

    def place_of(self, step: int) -> tuple[int, int]:
        """Returns the epoch of the training's `step`, and the step's number in that epoch."""
        return divmod(self.played[step] if self.played else step, self.steps_per_epoch)

    def smallest_micro_batch(self) -> tuple[int, int, int]:
        """Returns (rows, step, rank) of an epoch's smallest micro-batch with rows. BatchNorm refuses one row."""
        return min(size for size in self._sizes() if size[0])

    def without_rows(self) -> tuple[int, int] | None:
        """Returns (step, rank) of the first micro-batch of an epoch without rows; None where each has some."""
        return next(((step, rank) for rows, step, rank in self._sizes() if not rows), None)

    def _sizes(self) -> Iterator[tuple[int, int, int]]:
        """Yields (rows, step, rank) of an epoch's first and last step's micro-batches; others are like these."""
        final = self.steps_per_epoch - self.phases
        rows_of = {0: min(self.global_batch, self.length)}
        rows_of[final] = min(self.global_batch, self.length - final // self.phases * self.global_batch)
        for step, in_step in rows_of.items():
            for rank, in_rank in enumerate(cut(in_step, self.world_size)):
                for rows in cut(in_rank, self.micro_batches):
                    yield rows, step, rank

    def _weigh(self, indices: NDArray[np.int64]) -> float:
        return float(len(indices)) if self.weight is None else float(sum(self.weight(int(i)) for i in indices))


@dataclass(frozen=True)
class Ordered:
    """Job.order, of a dataset of `samples` samples: Weighted, ByLength, Lanes or a function."""

    order: Any
    samples: int

    def indices(self, rows: int, batch: int, seed: int, epoch: int) -> NDArray[np.int64]:
        """Returns the `rows` indices of an epoch. Raises UserError where a function gives another number of them."""
        found = _own_order(self.order, self.samples, batch, seed, epoch)
        if len(found) != rows:
            raise UserError(
                f"the job's order gave {rows} indices for epoch 0, and {len(found)} for epoch {epoch}; give as many in "
                "each epoch, some of them several times"
            )
        return found

    def repeats(self, batch: int, seed: int, epoch: int) -> NDArray[np.int64] | None:
        """Returns how often each row of an epoch has come before in it; None where no row is repeated."""
        once = isinstance(self.order, ByLength | Lanes)
        return None if once else _repeats(self.order, self.samples, batch, seed, epoch)


def schedule_of(job: Job, world_size: int) -> Schedule:
    """Returns the schedule of a job on `world_size` replicas."""
    numbers = (job.global_batch, world_size, job.seed, job.micro_batch, job.last, job.weight, job.shuffle)
    phases = max(1, len(job.phases))
    if job.order is None:
        return Schedule(len(job.train), *numbers, phases=phases)
    rows = len(_own_order(job.order, len(job.train), job.global_batch, job.seed, 0))
    if job.last == "drop" and rows < job.global_batch:
        raise UserError(
            f"last=drop leaves no step: order gives {rows} rows, fewer than global_batch {job.global_batch}"
        )
    return Schedule(rows, *numbers, Ordered(job.order, len(job.train)), phases)


def check_epochs(job: Job) -> None:
    """Raises UserError where the job's order has another number of rows in a later epoch. Of many epochs it looks at
    the first ones, the last, and those between by doubling: a curriculum's rows only become more, or fewer."""
    schedule = schedule_of(job, 1)
    steps = job.epochs * schedule.steps_per_epoch
    epochs = ceil(min(steps, job.max_steps or steps) / schedule.steps_per_epoch)
    if callable(job.order):
        for epoch in sorted({1 << bit for bit in range(epochs.bit_length())} | {epochs - 1}):
            if 0 < epoch < epochs:
                schedule.order(epoch)


def _generator(seed: int, epoch: int) -> torch.Generator:
    return torch.Generator().manual_seed(key(seed, "order", epoch))


@lru_cache(maxsize=2)
def _order(length: int, seed: int, epoch: int) -> NDArray[np.integer[Any]]:
    # Every rank keeps the order of two epochs. torch draws the same one in either dtype.
    dtype = torch.int32 if length <= torch.iinfo(torch.int32).max else torch.int64
    order: NDArray[np.integer[Any]] = torch.randperm(length, dtype=dtype, generator=_generator(seed, epoch)).numpy()
    return order


@lru_cache(maxsize=3)
def _own_order(order: Any, samples: int, batch: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Returns the indices of an epoch in the job's own order. Raises UserError for those that the dataset lacks."""
    generator = _generator(seed, epoch)
    if isinstance(order, Weighted):
        totals = np.cumsum(np.asarray(order.weights, dtype=np.float64))
        drawn = torch.rand(order.num_samples or samples, dtype=torch.float64, generator=generator).numpy() * totals[-1]
        chosen: NDArray[np.int64] = np.searchsorted(totals, drawn, side="right").clip(max=samples - 1)
        return chosen
    if isinstance(order, ByLength):
        rank = np.empty(samples, dtype=np.int64)
        rank[np.argsort(np.asarray(order.lengths), kind="stable")] = np.arange(samples)
        shuffled = torch.randperm(samples, generator=generator).numpy()
        full, remainder = np.split(shuffled, [samples - samples % batch])
        by_bucket = full[np.argsort(rank[full] * order.buckets // samples, kind="stable")]
        places = torch.randperm(len(full) // batch, generator=generator).numpy()
        return np.concatenate([by_bucket.reshape(-1, batch)[places].reshape(-1), remainder])
    if isinstance(order, Lanes):
        lanes = np.arange(samples - samples % batch).reshape(batch, -1)
        return np.concatenate([lanes.T.reshape(-1), np.arange(lanes.size, samples)])
    found = np.asarray(order(epoch, generator), dtype=np.int64).reshape(-1)
    if not len(found) or found.min() < 0 or found.max() >= samples:
        raise UserError(f"the job's order gives indices for epoch {epoch} that are not all of 0 to {samples - 1}")
    return found


@lru_cache(maxsize=2)
def _repeats(order: Any, samples: int, batch: int, seed: int, epoch: int) -> NDArray[np.int64]:
    rows = _own_order(order, samples, batch, seed, epoch)
    places = np.argsort(rows, kind="stable")
    repeats = np.empty(len(rows), dtype=np.int64)
    repeats[places] = np.arange(len(rows)) - np.searchsorted(rows[places], rows[places], side="left")
    return repeats
