"""The gradients of one step of all ranks, and which combination of the ranks' own gradients they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samestep.proof.script.updates import Ranks
from samestep.records.record import Record
from samestep.records.script import COMPRESSED, LOCAL, MICRO_BATCHES, STEP, TAKEN, UNCLIPPED, of_kind

Array = NDArray[np.float64]
CLOSE = 1e-5  # relative: float32's rounding in a sum over ranks is about 1e-7
CLOSE_OF = {"bfloat16": 3e-2, "float16": 4e-3}


def norm(array: Array) -> float:
    return float(np.linalg.norm(array))


def of_ranks(record: Record, ranks: Ranks, step: int) -> list[dict[str, Array]]:
    """Reads the arrays of one step of each rank."""
    return [record.arrays(STEP.format(step), rank.rank) for rank in ranks]


def whole(arrays: Sequence[Mapping[str, Array]], kind: str, shards: Sequence[str]) -> list[dict[str, Array]]:
    """Returns [rank] parameter -> its gradient of one kind; of sharded parameters the sum of all ranks' parts."""
    of = [of_kind(each, kind) for each in arrays]
    sums = {name: np.sum([each[name] for each in of], axis=0) for name in shards if all(name in each for each in of)}
    return [{**each, **sums} for each in of]


@dataclass
class StepGradients:
    """The gradients of one step.

    local: [rank] parameter -> [micro-batch] the rank's own. reduced: [rank] parameter -> what is to be their mean, as
    it was before clipping. taken: what the optimizer took. scale: a gradient scaler's factor, by which a reduced one
    may have been divided. factor: by which the sum over ranks and micro-batches is multiplied in most of `reduced`.
    worst: the greatest relative distance from that. is_compressed: whether a communication hook may hand on less.
    """

    names: list[str]
    local: list[dict[str, list[Array]]]
    reduced: list[dict[str, Array]]
    taken: list[dict[str, Array]]
    micro: int
    close: float
    clipped: bool
    scale: float = 1.0
    factor: float = 1.0
    worst: float = 0.0
    is_compressed: bool = False
    _bad: list[tuple[int, str]] = field(default_factory=list)

    @classmethod
    def read(cls, record: Record, ranks: Ranks, step: int) -> StepGradients:
        """Reads a step from the ranks' files. Parameters whose gradient is zero on all ranks are left out."""
        arrays, shards = of_ranks(record, ranks, step), ranks[0].steps[step].shards
        taken, unclipped = whole(arrays, TAKEN, shards), whole(arrays, UNCLIPPED, shards)
        micro = max(len(rank.steps[step].micro) for rank in ranks)
        kept = max(1, min(micro, MICRO_BATCHES))
        shared = [name for name in taken[0] if all(name in each for each in taken)]
        local = [{name: _local(each, name, kept, taken[0][name]) for name in shared} for each in arrays]
        names = [name for name in shared if any(part.any() for each in local for part in each[name])]
        reduced = [{name: before.get(name, after[name]) for name in names} for before, after in zip(unclipped, taken)]
        close = max(CLOSE_OF.get(dtype, CLOSE) for dtype in ranks[0].steps[step].dtypes or ["float32"])
        scale = ranks[0].steps[step].scale or 1.0
        self = cls(names, local, reduced, taken, max(1, micro), close, any(unclipped), scale)
        self.is_compressed = COMPRESSED in ranks[0].steps[step].dtypes
        self._fit()
        return self

    @property
    def size(self) -> int:
        return len(self.local)

    def not_finite(self) -> tuple[int, str] | None:
        """Returns (rank, parameter) of a gradient that holds NaN or an infinity; None where there is none."""
        for rank, (reduced, local) in enumerate(zip(self.reduced, self.local)):
            for name in self.names:
                if not all(np.isfinite(each).all() for each in (reduced[name], *local[name])):
                    return rank, name
        return None

    def bad(self) -> list[tuple[int, str]]:
        """Returns (rank, parameter) of each gradient that is not the sum times the common factor."""
        return self._bad

    def is_own(self, rank: int, name: str, divided_by: int = 1) -> bool:
        """Whether a gradient is what the rank computed by itself, on all its micro-batches."""
        own = sum(self.local[rank][name]) / divided_by
        return self.size > 1 and self._is_near(self.reduced[rank][name], own, name)

    def are_own(self) -> bool:
        """Whether each gradient that is not the mean is what the rank computed by itself, since the step before."""
        return all(self.is_own(*pair) for pair in self._bad)

    def is_partial(self, rank: int, name: str, last: int) -> bool:
        """Whether a gradient is the mean of the micro-batches up to `last`, and the rank's own after it."""
        first = sum(sum(each[name][: last + 1]) for each in self.local) / self.size
        return self._is_near(self.reduced[rank][name], first + sum(self.local[rank][name][last + 1 :]), name)

    def is_up_to(self, rank: int, name: str, last: int) -> bool:
        """Whether a gradient is the mean of the micro-batches up to `last`."""
        first = sum(sum(each[name][: last + 1]) for each in self.local) / self.size
        return self._is_near(self.reduced[rank][name], first, name)

    def is_rest(self, rank: int, name: str, first: int) -> bool:
        """Whether a gradient is the mean of the micro-batches from `first` on."""
        rest = sum(sum(each[name][first:]) for each in self.local) / self.size
        return self._is_near(self.reduced[rank][name], rest, name)

    def holds(self, rank: int, name: str, before: Mapping[str, Array]) -> bool:
        """Whether a gradient is the mean and, added to it, what was taken in the step before."""
        if name not in before:
            return False
        held = before[name] / self.scale  # a scaler has divided it, too
        mean, gradient = self._sum(name) / self.size, self.reduced[rank][name]
        return any(self._is_near(gradient * divided - held, mean, name) for divided in {1, self.micro})

    def distance(self, rank: int, name: str) -> float:
        """Returns how far a gradient is from the sum times the common factor, relative to what the ranks computed."""
        scale = abs(self.factor) * self._size_of(name)
        return norm(self.reduced[rank][name] - self.factor * self._sum(name)) / scale if scale else 0.0

    def _sum(self, name: str) -> Array:
        total: Array = sum((part for each in self.local for part in each[name]), np.zeros_like(self.taken[0][name]))
        return total

    def _size_of(self, name: str) -> float:
        """The size of what was added up, before anything cancels: rounding is relative to that."""
        return sum(norm(part) for each in self.local for part in each[name])

    def _is_near(self, gradient: Array, wanted: Any, name: str) -> bool:
        """Whether a gradient is the wanted one; or that divided by the micro-batches, as by hand, or by a scaler."""
        near = self.close * max(norm(np.asarray(wanted)), self._size_of(name) / self.size)
        by = {scale * divided for scale in (1.0, self.scale) for divided in (1, self.micro)}
        return any(norm(gradient * each - wanted) <= near for each in by)

    def _fit(self) -> None:
        """Finds the factor of most gradients, and those that do not have it."""
        fits: list[float] = []
        for name in self.names:
            total = self._sum(name)
            square = float(total @ total)
            for reduced in self.reduced:
                if not np.isfinite(reduced[name]).all():
                    continue
                factor = float(reduced[name] @ total) / square if square else 0.0
                rounding = self.close * abs(factor) * self._size_of(name)
                if factor and norm(reduced[name] - factor * total) <= rounding:
                    fits.append(factor)
        # Without a majority every gradient is compared with the mean.
        self.factor = float(np.median(fits)) if fits and 2 * len(fits) >= len(self.names) * self.size else 1 / self.size
        pairs = [(rank, name) for name in self.names for rank in range(self.size)]
        distances = {pair: self.distance(*pair) for pair in pairs}
        self._bad = sorted(pair for pair in pairs if distances[pair] > self.close)
        self.worst = max(distances.values(), default=0.0)


def _local(arrays: dict[str, Array], name: str, kept: int, like: Array) -> list[Array]:
    return [arrays.get(LOCAL.format(number, name), np.zeros_like(like)) for number in range(kept)]
