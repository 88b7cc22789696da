"""Reads when and how ranks that step apart bring their weights together: as a mean, a sum, or by an outer optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from samestep.bounds import AVERAGED_APART, COARSER, LEAST_SHARE, TIMES_ERROR, TOLD_APART
from samestep.judge.findings import Ranks
from samestep.judge.fit import Array, fit, norm
from samestep.records.record import Record
from samestep.records.script import AFTER, BEFORE, OUTER_GRADIENT, OUTER_WEIGHTS, STEP, TAKEN, of_kind

Arrays = dict[str, Array]  # of one rank, by the names of the parameters


@dataclass(frozen=True)
class Shares:
    """How much of each rank's way, since all ranks had the same weights, other weights hold.

    of_ranks: one for each rank. base: how much of the weights from which the ways go, one where nothing is scaled.
    error: how far a share may be off. shape of of_ranks [ranks].
    """

    of_ranks: Array
    base: float
    error: float

    @property
    def total(self) -> float:
        return float(self.of_ranks.sum())

    @property
    def near(self) -> float:
        return max(TOLD_APART * float(abs(self.of_ranks).max()), self.error)

    @property
    def are_even(self) -> bool:
        return float(np.ptp(self.of_ranks)) <= 2 * self.near

    def missing(self) -> list[int]:
        """Returns the ranks of which the weights hold nothing."""
        largest = float(abs(self.of_ranks).max())
        return [rank for rank, share in enumerate(self.of_ranks) if abs(share) <= max(LEAST_SHARE * largest, self.near)]


@dataclass(frozen=True)
class Meeting:
    """Weights that the script has written on ranks which had stepped apart."""

    steps: list[int]
    """[rank] the step that begins with these weights."""

    start: list[Arrays]
    """[rank] weights from which the ranks had begun to step apart."""

    own: list[Arrays]
    """[rank] weights after the rank's last own step."""

    new: list[Arrays]
    """[rank] weights that were written."""

    gradients: list[Arrays]
    """[rank] what an outer optimizer took as its gradients. Empty where there is none."""

    outer: list[Arrays]
    """[rank] copies that the outer optimizer moved. Empty where it moves the model's own parameters."""

    close: float
    """How far a fit of weights may be off, relative to them."""

    @property
    def names(self) -> list[str]:
        """The parameters that had stepped apart."""
        return [name for name in self.own[0] if not _are_alike(self.own, [name])]

    @property
    def is_alike(self) -> bool:
        """Whether all ranks have the same weights then."""
        return _are_alike(self.new, self.changed)

    @property
    def changed(self) -> list[str]:
        """The parameters that were written on some rank."""
        return [name for name in self.names if len(self.idle(name)) < len(self.own)]

    def idle(self, name: str) -> list[int]:
        """Returns the ranks on which a parameter stays what it was."""
        pairs = zip(self.own, self.new)
        return [rank for rank, (own, new) in enumerate(pairs) if np.array_equal(own[name], new[name])]

    def joins(self) -> bool:
        """Whether ranks have handed weights on: all have the same, or some hold those of another rank."""
        if self.changed and self.is_alike:
            return True
        shares = [self.of_gradient(rank) if self.gradients else self.of_weights(rank) for rank in range(len(self.own))]
        return any(
            set(range(len(self.own))) - {rank, *of_rank.missing()} for rank, of_rank in enumerate(shares) if of_rank
        )

    def way(self) -> Array | None:
        """Returns the mean way of all ranks; None where they began apart."""
        if not _are_alike(self.start, self.names):
            return None
        mean: Array = np.mean([_together(own, self.changed) for own in self.own], axis=0)
        return mean - _together(self.start[0], self.changed)

    def of_weights(self, rank: int, past: Sequence[Array] = ()) -> Shares | None:
        """Returns the shares in the weights that were written on a rank; None where these are no sum of the ranks'.

        past: ways of earlier meetings, of which an outer step with momentum holds some, too.
        """
        names = self.changed
        own, new = ([_together(arrays, names) for arrays in side] for side in (self.own, self.new))
        if _are_alike(self.start, names):
            start = _together(self.start[0], names)
            ways = [of_rank - start for of_rank in own]
            fitted = _fitted(new[rank], [*ways, *(way for way in past if len(way) == len(start)), start], self.close)
            return fitted and Shares(fitted.of_ranks[: len(own)], float(fitted.of_ranks[-1]), fitted.error)
        fitted = _fitted(new[rank], [*(of_rank - own[0] for of_rank in own[1:]), own[0]], self.close)
        if fitted is None:
            return None
        shares, total = fitted.of_ranks[:-1], float(fitted.of_ranks[-1])
        return Shares(np.array([total - shares.sum(), *shares]), total, fitted.error)

    def of_gradient(self, rank: int) -> Shares | None:
        """Returns the shares of the ranks' ways in the outer gradient of a rank, which goes against them; None where it
        is none of them."""
        if not self.gradients or not _are_alike(self.start, self.names):
            return None
        names = [name for name in self.names if name in self.gradients[rank]]
        start = _together(self.start[0], names)
        ways = [start - _together(own, names) for own in self.own]
        # The ways are differences of weights, by whose size they are rounded.
        close = self.close * norm(start) / max(max(map(norm, ways)), self.close)
        return _fitted(_together(self.gradients[rank], names), ways, max(close, self.close))


def meetings(ranks: Ranks, record: Record) -> list[Meeting]:
    """Returns the meetings of ranks that step with their own gradients, those at which some rank's weights were written
    between two steps."""
    begun = [[number for number, step in enumerate(rank.steps) if step.begun] for rank in ranks]
    often = max(begun, key=len)
    # A rank whose weights are never written keeps its own where others do not.
    begun = [of_rank or often for of_rank in begun]
    close = AVERAGED_APART * max((COARSER.get(dtype, 1.0) for dtype in ranks[0].steps[0].dtypes), default=1.0)
    found, start = list[Meeting](), [_first(record, rank.rank, len(rank.steps)) for rank in ranks]
    since = [0] * len(ranks)
    for steps in zip(*begun):
        arrays = [record.arrays(STEP.format(step), rank.rank) for step, rank in zip(steps, ranks)]
        own = [of_kind(record.arrays(STEP.format(step - 1), rank.rank), AFTER) for step, rank in zip(steps, ranks)]
        new = [of_kind(of_rank, BEFORE) or kept for of_rank, kept in zip(arrays, own)]
        if not all(own) or not all(start):
            return found
        is_outer = not any(rank.steps[step].micro_batches for step, rank in zip(steps, ranks))
        gradients, outer = [of_kind(of_rank, TAKEN) for of_rank in arrays], list[Arrays]()
        if not is_outer:
            of_steps = [_outer(record, rank.rank, range(first, step)) for first, step, rank in zip(since, steps, ranks)]
            gradients, outer = ([of_rank[part] for of_rank in of_steps] for part in (0, 1))
        known = gradients if all(gradients) else []
        found.append(Meeting([*steps], start, own, new, known, outer if known and not is_outer else [], close))
        # An outer step on the model's own parameters moves what was written.
        start = [of_kind(of_rank, AFTER) for of_rank in arrays] if is_outer else new
        since = [*steps]
    return found


def _first(record: Record, rank: int, steps: int) -> Arrays:
    """Returns the weights from which a rank begins to step apart."""
    found = (of_kind(record.arrays(STEP.format(step), rank), BEFORE) for step in range(steps))
    return next((arrays for arrays in found if arrays), {})


def _outer(record: Record, rank: int, steps: range) -> tuple[Arrays, Arrays]:
    """Returns the last outer step's gradients and the copies that it moved."""
    for step in reversed(steps):
        arrays = record.arrays(STEP.format(step), rank)
        if gradients := of_kind(arrays, OUTER_GRADIENT):
            return gradients, of_kind(arrays, OUTER_WEIGHTS)
    return {}, {}


def _together(arrays: Arrays, names: Sequence[str]) -> Array:
    return np.concatenate([arrays[name] for name in names]) if names else np.zeros(0)


def _are_alike(ranks: Sequence[Arrays], names: Sequence[str]) -> bool:
    return all(np.array_equal(of_rank[name], ranks[0][name]) for of_rank in ranks[1:] for name in names)


def _fitted(target: Array, columns: Sequence[Array], close: float) -> Shares | None:
    """Returns the weights of columns in a target, each column at its own size; None where the sum is not the target."""
    sizes = np.array([norm(column) for column in columns])
    if not sizes.all():
        return None
    fitted = fit(target, [column / size for column, size in zip(columns, sizes)], least=1)
    if fitted is None or fitted.left > close * norm(target):
        return None
    error = TIMES_ERROR * fitted.error / float(sizes.min())
    return Shares(fitted.weights / sizes, 1.0, error) if error < 1 else None
