"""The gradients of one step of all ranks, and which combination of the ranks' own gradients they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from samestep.bounds import (
    CLIP_EPS,
    COARSER,
    LEFT_BY_ROUNDING,
    LEFT_BY_WEIGHTS,
    REDUCED_APART,
    REDUCED_APART_IN,
    TOLD_APART,
    WEIGHTS_OF_MEAN,
    ZERO_GRADIENT,
)
from samestep.judge.findings import Ranks
from samestep.judge.fit import Array, fit, multiple_of, norm
from samestep.records.record import Record
from samestep.records.script import COMPRESSED, LOCAL, MICRO_BATCHES, STEP, TAKEN, UNCLIPPED, of_kind


def reduced_apart(dtypes: Sequence[str]) -> float:
    """Returns how far a reduced gradient may be from the sum of what the ranks computed, relative. dtypes: of the
    parameters; none: float32."""
    return max(REDUCED_APART_IN.get(dtype, REDUCED_APART) for dtype in dtypes or ["float32"])


def coarser_of(ranks: Ranks) -> float:
    """Returns how much coarser than float32's the bounds of a script are."""
    first = ranks[0].steps[0]
    return max(COARSER.get(dtype, 1.0) for dtype in [*first.dtypes, *first.computed] or ["float32"])


def before_clipping(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Returns the gradients of a step as they were before anything clipped them, of the arrays of that step."""
    return of_kind(arrays, TAKEN) | of_kind(arrays, UNCLIPPED)


def computed_gradients(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Returns the gradients that the backward passes of a rank have computed in a step, added up over its
    micro-batches, of the arrays of that step."""
    sums = dict[str, Array]()
    for number in range(MICRO_BATCHES):
        for name, array in of_kind(arrays, LOCAL.format(number, "")).items():
            sums[name] = sums[name] + array if name in sums else array
    return sums


def clipping_factor(limit: float, norm_of_gradients: float) -> float:
    """Returns by what torch.nn.utils.clip_grad_norm_ multiplies gradients of this norm."""
    return min(1.0, limit / (norm_of_gradients + CLIP_EPS))


def norm_of_all(arrays: Mapping[str, Array], names: Sequence[str]) -> float:
    """Returns the norm of some parameters' gradients together."""
    return float(np.sqrt(sum(norm(arrays[name]) ** 2 for name in names)))


def arrays_of_ranks(record: Record, ranks: Ranks, step: int) -> list[dict[str, Array]]:
    """Reads the arrays of one step of each rank."""
    return [record.arrays(STEP.format(step), rank.rank) for rank in ranks]


def whole_gradients(arrays: Sequence[Mapping[str, Array]], kind: str, shards: Sequence[str]) -> list[dict[str, Array]]:
    """Returns [rank] parameter -> its gradient of one kind; of sharded parameters the sum of all ranks' parts."""
    gradients = [of_kind(of_rank, kind) for of_rank in arrays]
    sharded = [name for name in shards if all(name in of_rank for of_rank in gradients)]
    sums = {name: np.sum([of_rank[name] for of_rank in gradients], axis=0) for name in sharded}
    return [{**of_rank, **sums} for of_rank in gradients]


@dataclass
class StepGradients:
    """The gradients of one step of all ranks."""

    names: list[str]
    """The parameters that are judged."""

    local: list[dict[str, list[Array]]]
    """Each rank's own gradients: [rank] parameter -> [micro-batch]."""

    reduced: list[dict[str, Array]]
    """The gradients that are to be the mean of the ranks' own, before clipping: [rank] parameter -> gradient."""

    taken: list[dict[str, Array]]
    """The gradients that the optimizer took: [rank] parameter -> gradient."""

    micro_batches: int
    """The number of micro-batches in the step."""

    close: float
    """How far a reduced gradient may be from the sum of what the ranks computed, relative."""

    clipped: bool
    """Whether gradients were clipped in the step."""

    scale: float = 1.0
    """The factor of a gradient scaler, by which a reduced gradient may have been divided. 1: there is no scaler."""

    factor: float = 1.0
    """The factor by which the sum over ranks and micro-batches is multiplied in most of `reduced`."""

    worst: float = 0.0
    """The greatest relative distance of a reduced gradient from the sum times `factor`."""

    is_compressed: bool = False
    """Whether a communication hook may hand on less than the gradients."""

    not_mean: list[tuple[int, str]] = field(default_factory=list)
    """(rank, parameter) of each gradient that is not the sum times `factor`."""

    @classmethod
    def read(cls, record: Record, ranks: Ranks, step: int) -> StepGradients:
        """Reads a step from the ranks' files. Left out are parameters whose gradient is zero, or rounding beside the
        step's largest, on all ranks; and those that no optimizer holds or moves, whose gradients nothing clears."""
        first = ranks[0].steps[step]
        arrays = arrays_of_ranks(record, ranks, step)
        taken, unclipped = (whole_gradients(arrays, kind, first.shards) for kind in (TAKEN, UNCLIPPED))
        micro_batches = max(len(rank.steps[step].micro_batches) for rank in ranks)
        recorded = max(1, min(micro_batches, MICRO_BATCHES))
        shared = [name for name in taken[0] if all(name in of_rank for of_rank in taken)]
        local = [{name: _local(of_rank, name, recorded, taken[0][name]) for name in shared} for of_rank in arrays]
        names = _judged([name for name in shared if not _is_left_out(ranks, name)], local)
        gradients = cls(
            names=names,
            local=local,
            reduced=[
                {name: before.get(name, after[name]) for name in names} for before, after in zip(unclipped, taken)
            ],
            taken=taken,
            micro_batches=max(1, micro_batches),
            close=reduced_apart(first.dtypes),
            clipped=any(unclipped),
            scale=first.scale or 1.0,
            is_compressed=COMPRESSED in first.dtypes,
        )
        gradients._fit()
        return gradients

    def reduced_to(self, reduced: Sequence[Mapping[str, Array]]) -> StepGradients | None:
        """Returns these with other reduced gradients, [rank] parameter -> gradient; None where some are missing, or not
        the mean of what the ranks have computed."""
        if not self.names or any(name not in of_rank for of_rank in reduced for name in self.names):
            return None
        gradients = replace(self, reduced=[{name: of_rank[name] for name in self.names} for of_rank in reduced])
        gradients._fit()
        return None if gradients.not_mean else gradients

    @property
    def size(self) -> int:
        return len(self.local)

    def not_finite(self) -> tuple[int, str] | None:
        """Returns (rank, parameter) of a gradient that holds NaN or an infinity; None where there is none."""
        for rank, (reduced, local) in enumerate(zip(self.reduced, self.local)):
            for name in self.names:
                if not all(np.isfinite(gradient).all() for gradient in (reduced[name], *local[name])):
                    return rank, name
        return None

    def is_own(self, rank: int, name: str, divided_by: int = 1) -> bool:
        """Returns whether a gradient is what the rank computed by itself, on all its micro-batches."""
        computed = sum(self.local[rank][name], np.zeros(1)) / divided_by
        return self.size > 1 and self._is_near(self.reduced[rank][name], computed, name)

    def are_own(self) -> bool:
        """Returns whether each gradient that is not the mean is what the rank computed by itself, since the step
        before."""
        return all(self.is_own(*pair) for pair in self.not_mean)

    def are_alike(self) -> bool:
        """Returns whether all ranks have the same gradients, to the last bit."""
        return all(
            np.array_equal(of_rank[name], self.reduced[0][name]) for of_rank in self.reduced for name in self.names
        )

    def are_own_clipped(self) -> bool:
        """Returns whether each gradient that is not the mean is the rank's own times a factor, at most one."""
        for rank, name in self.not_mean:
            own_gradient: Array = sum(self.local[rank][name], np.zeros(1))
            factor, left = multiple_of(self.reduced[rank][name], own_gradient)
            if not 0 < factor <= 1 + self.close or left > self.close * factor * self.size_of_parts(name):
                return False
        return self.size > 1

    def is_partial(self, rank: int, name: str, last: int) -> bool:
        """Returns whether a gradient is the mean of the micro-batches up to `last`, and the rank's own after it."""
        added = sum(self.local[rank][name][last + 1 :], np.zeros(1))
        return self._is_near(self.reduced[rank][name], self._mean(name, slice(last + 1)) + added, name)

    def is_mean_of(self, rank: int, name: str, micro_batches: slice) -> bool:
        """Returns whether a gradient is the mean of some of the micro-batches."""
        return self._is_near(self.reduced[rank][name], self._mean(name, micro_batches), name)

    def holds(self, rank: int, name: str, before: Mapping[str, Array]) -> bool:
        """Returns whether a gradient is the mean and, added to it, what was taken in the step before."""
        if name not in before:
            return False
        held = before[name] / self.scale  # a scaler has divided it, too
        mean, gradient = self._mean(name), self.reduced[rank][name]
        return any(self._is_near(gradient * divided - held, mean, name) for divided in {1, self.micro_batches})

    def ranks_not_finite(self) -> list[int]:
        """Returns the ranks whose own gradient holds NaN or an infinity, before any reduction."""
        return [
            rank
            for rank, local in enumerate(self.local)
            if not all(np.isfinite(part).all() for parts in local.values() for part in parts)
        ]

    def is_mean_clipped_alike(self) -> bool:
        """Returns whether each gradient is the mean times a factor of its parameter's, at most one, that all ranks
        share."""
        for name in self.names:
            mean = self._mean(name)
            factors, left = zip(*(multiple_of(reduced[name], mean) for reduced in self.reduced))
            rounding = self.close * self.size_of_parts(name) / self.size * max(map(abs, factors))
            if max(left) > rounding or max(factors) > 1 + self.close or min(factors) <= 0:
                return False
            if max(factors) - min(factors) > self.close * max(factors):
                return False
        return True

    def is_mean_of_clipped(self) -> bool:
        """Returns whether each gradient is a mean in which the ranks' own gradients weigh unequally, none more than
        one."""
        unequal = False
        for name in self.names:
            rank_gradients = [sum(local[name], np.zeros(1)) / self.size for local in self.local]
            for fitted in (fit(reduced[name], rank_gradients, least=1) for reduced in self.reduced):
                if fitted is None:
                    break
                weights = fitted.weights
                if min(weights) <= 0 or max(weights) > 1 + self.close:
                    return False
                if fitted.left > self.close * self.size_of_parts(name) / self.size * max(weights):
                    return False
                unequal |= max(weights) - min(weights) > TOLD_APART * max(weights)
        return unequal

    def shares_in(self, wanted: Mapping[str, Array]) -> tuple[int, list[float]] | None:
        """Returns a micro-batch, and how much each rank's own gradient of it weighs in another gradient, where that is
        theirs, added up with other weights than on the ranks, which are one together in each micro-batch, as the
        gradient of the mean over all rows is of the ranks' means; None where that does not give it. The micro-batch is
        that whose weights are the farthest from even."""
        names = [name for name in self.names if name in wanted]
        parts = [
            [np.concatenate([arrays[name][m] for name in names]) for m in range(self._recorded)]
            for arrays in self.local
        ]
        columns = [part * self.factor for of_rank in parts for part in of_rank]
        pair = (self.reduced[0], wanted)
        recorded, target = (np.concatenate([arrays[name] for name in names]) for arrays in pair)
        fitted = fit(target, columns)
        if fitted is None:
            return None
        weights, rounding = fitted.weights, self.close * np.sum(np.abs(columns), axis=0)
        of_ranks = weights.reshape(self.size, -1)
        together = np.abs(of_ranks.sum(0) / self.size - 1).max()
        difference = norm(target - recorded)
        explained = fitted.left <= max(LEFT_BY_WEIGHTS * difference, min(norm(rounding), LEFT_BY_ROUNDING * difference))
        uneven = np.abs(of_ranks - of_ranks.mean(0)).max(0)
        if (
            not explained
            or together > WEIGHTS_OF_MEAN
            or weights.min() < -WEIGHTS_OF_MEAN
            or uneven.max() <= TOLD_APART
        ):
            return None
        number = int(uneven.argmax())
        return number, [float(share) for share in of_ranks[:, number] / of_ranks[:, number].sum()]

    @property
    def _recorded(self) -> int:
        """How many micro-batches' gradients are known apart."""
        return max(len(parts) for of_rank in self.local for parts in of_rank.values())

    def as_mean(self) -> StepGradients:
        """Returns the step as though its gradients had been reduced to their mean, and not clipped."""
        mean = {name: self._mean(name) for name in self.names}
        return replace(self, reduced=[mean] * self.size, factor=1 / self.size, clipped=False, not_mean=[])

    @np.errstate(invalid="ignore")  # a gradient may not be finite
    def distance(self, rank: int, name: str) -> float:
        """Returns how far a gradient is from the sum times the common factor, relative to what the ranks computed."""
        scale = abs(self.factor) * self.size_of_parts(name)
        return norm(self.reduced[rank][name] - self.factor * self._mean(name) * self.size) / scale if scale else 0.0

    def size_of_parts(self, name: str) -> float:
        """Returns the size of what was added up, before anything cancels: rounding is relative to that."""
        return sum(norm(part) for of_rank in self.local for part in of_rank[name])

    def _mean(self, name: str, micro_batches: slice = slice(None)) -> Array:
        """Returns the sum of some micro-batches' gradients, as the mean over ranks."""
        parts = [part for of_rank in self.local for part in of_rank[name][micro_batches]]
        total: Array = sum(parts, np.zeros_like(self.taken[0][name]))
        return total / self.size

    def _is_near(self, gradient: Array, wanted: Array, name: str) -> bool:
        """Returns whether a gradient is the wanted one; or that divided by the micro-batches, as by hand, or by a
        scaler."""
        near = self.close * max(norm(wanted), self.size_of_parts(name) / self.size)
        factors = {scale * divided for scale in (1.0, self.scale) for divided in (1, self.micro_batches)}
        return any(norm(gradient * factor - wanted) <= near for factor in factors)

    def _fit(self) -> None:
        """Finds the factor of most gradients, and those that do not have it."""
        fits: list[float] = []
        for name in self.names:
            total = self._mean(name) * self.size
            for reduced in self.reduced:
                if not np.isfinite(reduced[name]).all():
                    continue
                factor, left = multiple_of(reduced[name], total)
                if factor and left <= self.close * abs(factor) * self.size_of_parts(name):
                    fits.append(factor)
        # Without a majority every gradient is compared with the mean.
        self.factor = float(np.median(fits)) if fits and 2 * len(fits) >= len(self.names) * self.size else 1 / self.size
        distances = {(rank, name): self.distance(rank, name) for name in self.names for rank in range(self.size)}
        self.not_mean = sorted(pair for pair, distance in distances.items() if distance > self.close)
        self.worst = max(distances.values(), default=0.0)


def _is_left_out(ranks: Ranks, name: str) -> bool:
    """Returns whether no step moves a parameter, and no optimizer holds it."""
    steps = [step for rank in ranks for step in rank.steps]
    return any(step.moved or step.foreign for step in steps) and not any(
        name in step.held or name in step.moved for step in steps
    )


def _judged(names: Sequence[str], local: Sequence[Mapping[str, Sequence[Array]]]) -> list[str]:
    """Returns the names of the parameters whose gradient is no rounding of zero on some rank."""
    sizes = {
        name: max((float(abs(part).max(initial=0.0)) for of_rank in local for part in of_rank[name]), default=0.0)
        for name in names
    }
    finite = [size for size in sizes.values() if np.isfinite(size)]
    return [name for name, size in sizes.items() if not size <= ZERO_GRADIENT * max(finite, default=0.0)]


def _local(arrays: Mapping[str, Array], name: str, count: int, like: Array) -> list[Array]:
    return [arrays.get(LOCAL.format(number, name), np.zeros_like(like)) for number in range(count)]
