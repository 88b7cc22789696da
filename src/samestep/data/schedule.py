"""Schedule: which rank sees which sample at which step. A pure function of the job's numbers, with no I/O.

Global batch t is the same set for every world size; no sample is seen twice in an epoch, none is lost. A step is
cut into exactly A micro-batches on every rank; remainders go to the low ranks, so rank 0 is never without rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from samestep.errors import UserError
from samestep.job import Job, Part

FILL_ROWS = 2  # what a rank without rows runs, times zero: the least that BatchNorm accepts


def key(*parts: int | str) -> int:
    """A 63-bit seed from a path such as (seed, 'order', epoch): streams of different paths are unrelated."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


@lru_cache(maxsize=64)
def cut(rows: int, parts: int) -> tuple[int, ...]:
    """Sizes of `parts` parts of `rows` rows, as even as can be, the larger ones first: cut(7, 3) = (3, 2, 2)."""
    base, extra = divmod(rows, parts)
    return tuple(base + (i < extra) for i in range(parts))


@dataclass(frozen=True)
class Schedule:
    """length: samples in the dataset. global_batch: rows of one step over all ranks. world_size: ranks.

    micro_batch: the most rows that a rank takes at once; None: all of its part. weight: of a sample, by its index.
    shuffle: False keeps the dataset's order in every epoch.
    """

    length: int
    global_batch: int
    world_size: int = 1
    seed: int = 0
    micro_batch: int | None = None
    last: Literal["keep", "drop"] = "keep"
    weight: Callable[[int], float] | None = None
    shuffle: bool = True

    @property
    def steps_per_epoch(self) -> int:
        whole, rest = divmod(self.length, self.global_batch)
        return whole + (1 if rest and self.last == "keep" else 0)

    @property
    def micro_batches(self) -> int:
        """A: into how many micro-batches every step is cut, on every rank."""
        most = ceil(self.global_batch / self.world_size)
        return ceil(most / self.micro_batch) if self.micro_batch else 1

    def order(self, epoch: int) -> NDArray[np.int64]:
        """The samples in the order of this epoch, the same on every rank. shape [length]"""
        return _order(self.length, self.seed, epoch) if self.shuffle else np.arange(self.length)

    def _global_batch(self, epoch: int, number: int) -> NDArray[np.int64]:
        start, end = number * self.global_batch, min((number + 1) * self.global_batch, self.length)
        return self.order(epoch)[start:end] if self.shuffle else np.arange(start, end)  # a stream may be very long

    def step(self, rank: int, epoch: int, number: int) -> list[Part]:
        """Rank's A parts of step `number` of `epoch`, in the order in which they run."""
        whole = self._global_batch(epoch, number)
        per_rank = cut(len(whole), self.world_size)
        first = sum(per_rank[:rank])
        mine = whole[first : first + per_rank[rank]]
        total = self._weigh(whole)
        if not total > 0:
            raise UserError(f"the weights of the rows of step {number} add up to {total}; a mean needs more than 0")
        parts, at = [], 0
        for micro, rows in enumerate(cut(len(mine), self.micro_batches)):
            indices = mine[at : at + rows]
            at += rows
            weight = self._weigh(indices)
            last = micro == self.micro_batches - 1
            parts.append(
                Part(
                    epoch=epoch,
                    step=epoch * self.steps_per_epoch + number,
                    micro=micro,
                    indices=indices if rows else np.resize(whole, FILL_ROWS),
                    rows=rows,
                    weight=weight,
                    share=weight * self.world_size / total,
                    completes_step=last,
                    completes_epoch=last and number == self.steps_per_epoch - 1,
                )
            )
        return parts

    def rows_of(self, steps: int) -> int:
        """How many rows the first `steps` steps see, on all ranks."""
        epochs, more = divmod(steps, self.steps_per_epoch)
        return epochs * min(self.length, self.steps_per_epoch * self.global_batch) + more * self.global_batch

    def parts(self, rank: int, steps: int) -> Iterator[Part]:
        """Rank's parts of the first `steps` steps, epoch after epoch."""
        for step in range(steps):
            yield from self.step(rank, *divmod(step, self.steps_per_epoch))

    def smallest_part(self) -> tuple[int, int, int]:
        """(rows, step, rank) of the smallest part of an epoch that has rows: what BatchNorm may refuse."""
        return min(part for part in self._sizes() if part[0])

    def without_rows(self) -> tuple[int, int] | None:
        """(step, rank) of the first part of an epoch that has no rows, or None."""
        return next(((step, rank) for rows, step, rank in self._sizes() if not rows), None)

    def _sizes(self) -> Iterator[tuple[int, int, int]]:
        """(rows, step, rank) of the parts of a whole step and of the last one."""
        final = self.steps_per_epoch - 1
        rows_of = {0: min(self.global_batch, self.length)}
        rows_of[final] = min(self.global_batch, self.length - final * self.global_batch)
        for step, in_step in rows_of.items():
            for rank, in_rank in enumerate(cut(in_step, self.world_size)):
                for rows in cut(in_rank, self.micro_batches):
                    yield rows, step, rank

    def _weigh(self, indices: NDArray[np.int64]) -> float:
        return float(len(indices)) if self.weight is None else float(sum(self.weight(int(i)) for i in indices))


def schedule_of(job: Job, world_size: int) -> Schedule:
    """The schedule of a job on `world_size` ranks."""
    numbers = (job.global_batch, world_size, job.seed, job.micro_batch, job.last, job.weight, job.shuffle)
    return Schedule(len(job.train), *numbers)


@lru_cache(maxsize=2)
def _order(length: int, seed: int, epoch: int) -> NDArray[np.int64]:
    generator = torch.Generator().manual_seed(key(seed, "order", epoch))
    order: NDArray[np.int64] = torch.randperm(length, generator=generator).numpy()
    return order
