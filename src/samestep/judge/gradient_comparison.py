"""Compares the gradients that ranks have with those that they are to have: which are apart, how far, by what factor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Protocol

import numpy as np

from samestep.bounds import (
    ABOVE_ZERO,
    FIRST_ROUNDING,
    FIRST_STEP_APART,
    FLOAT32_ROUNDING,
    LATER_STEPS_APART,
    ROUNDED_BY_OTHERS,
    ROUNDING_GROWS,
    TOLD_APART,
)
from samestep.judge.findings import differs
from samestep.judge.fit import Array, multiple_of, norm
from samestep.judge.step_gradients import norm_of_all
from samestep.message import Message, message
from samestep.records.findings import Finding, Question

GRADIENT: Question = "replayed gradient"

Gradients = Mapping[int, Mapping[str, Array]]  # rank -> parameter -> its gradient there
Holder = tuple[int, str]  # (rank, parameter)


def largest_norm(gradients: Gradients) -> float:
    """Returns the norm of the gradients of the rank that has the largest ones, of those that are finite."""
    norms = [norm_of_all(of_rank, [*of_rank]) for of_rank in gradients.values()]
    return max(filter(math.isfinite, norms), default=0.0)


@dataclass(frozen=True)
class GradientComparison:
    """The gradients of one step that ranks have, beside those that they are to have."""

    found: Gradients
    """The gradients that the ranks have. A gradient that a rank has not counts as zeros: no row has chosen an
    expert."""

    wanted: Gradients
    """The gradients that they are to have. Those of other parameters are not compared."""

    bound: float = math.inf
    """How far a gradient may be from the wanted one, relative to its size. Infinite: nothing is apart."""

    sizes: Mapping[Holder, float] = field(default_factory=dict)
    """The size of a gradient that its rounding is relative to. Without an entry: its norm, or a small part of the norm
    of all gradients of a rank, where that is more."""

    @classmethod
    def without_zeros(cls, found: Gradients, wanted: Gradients, bound: float, *, rounding: float) -> GradientComparison:
        """Returns the comparison of those gradients that are more than rounding of zero, the wanted one or the one that
        is there. rounding: of zero, relative to the norm of all gradients."""
        least = rounding * largest_norm(wanted)
        whole = cls(found, wanted, bound)
        counted = {rank: dict[str, Array]() for rank in wanted}
        for rank, name in whole.holders:
            if not sum(map(norm, whole.pair(rank, name))) <= least:
                counted[rank][name] = wanted[rank][name]
        return cls(found, counted, bound)

    @cached_property
    def distances(self) -> dict[Holder, float]:
        """How far each gradient is from the wanted one, relative to its size. Gradients of another shape have none."""
        least = max(ROUNDED_BY_OTHERS * largest_norm(self.wanted), ABOVE_ZERO)
        distances = {}
        for rank, name in self.holders:
            wanted, found = self.pair(rank, name)
            if found.shape == wanted.shape:
                size = self.sizes.get((rank, name)) or max(norm(wanted), least)
                distances[rank, name] = norm(found - wanted) / size
        return distances

    @property
    def holders(self) -> list[Holder]:
        return [(rank, name) for rank, of_rank in self.wanted.items() for name in of_rank]

    @cached_property
    def apart(self) -> list[Holder]:
        """The gradients that are further than the bound from the wanted ones. One that is NaN is."""
        return [holder for holder, distance in self.distances.items() if not distance <= self.bound]

    @property
    def furthest(self) -> Holder:
        """The gradient that is the furthest from the wanted one."""
        return max(self.distances, key=lambda holder: self.distances[holder])

    @property
    def worst(self) -> float:
        """The distance of the furthest gradient."""
        return max(self.distances.values(), default=0.0)

    @property
    def distance_of_all(self) -> float:
        """How far all gradients together are from the wanted ones, relative to their norm."""
        pairs = [self.pair(*holder) for holder in self.distances]
        off = math.sqrt(sum(norm(found - wanted) ** 2 for wanted, found in pairs))
        return off / (math.sqrt(sum(norm(wanted) ** 2 for wanted, _ in pairs)) or 1.0)

    @property
    def names(self) -> list[str]:
        """The parameters of which a gradient is apart."""
        return list(dict.fromkeys(name for _, name in self.apart))

    @property
    def all_names(self) -> list[str]:
        return list(dict.fromkeys(name for _, name in self.holders))

    def pair(self, rank: int, name: str) -> tuple[Array, Array]:
        """Returns (the gradient that is wanted, the gradient that the rank has)."""
        wanted = self.wanted[rank][name]
        found = self.found[rank].get(name)
        return wanted, np.zeros_like(wanted) if found is None else found

    def not_finite(self, step: int) -> Message | None:
        """Returns which gradient is NaN or infinite, the wanted one or that of a rank; None where all are finite."""
        if broken := self.wanted_not_finite(step):
            return broken
        for rank, name in self.holders:
            if not np.isfinite(self.pair(rank, name)[1]).all():
                return message("gradient_of_rank_not_finite", parameter=name, rank=rank, step=step)
        return None

    def wanted_not_finite(self, step: int) -> Message | None:
        """Returns which wanted gradient is NaN or infinite; None where all are finite."""
        for rank, name in self.holders:
            if not np.isfinite(self.wanted[rank][name]).all():
                return message("replayed_gradient_not_finite", parameter=name, step=step)
        return None

    def factor(self, rank: int, name: str) -> float | None:
        """Returns by how much a gradient is the wanted one multiplied; None where it is no multiple of it."""
        wanted, found = self.pair(rank, name)
        if name not in self.found[rank] or not wanted.any():
            return None
        factor, left = multiple_of(found, wanted)
        return factor if left <= TOLD_APART * abs(factor) * norm(wanted) else None

    def common_factor(self, holders: Sequence[Holder]) -> float | None:
        """Returns the factor that all of these gradients have; None where they have none in common."""
        factors = [self.factor(*holder) for holder in holders]
        known = [factor for factor in factors if factor is not None]
        if not known or len(known) < len(factors) or max(known) - min(known) > TOLD_APART * max(map(abs, known)):
            return None
        return float(np.median(known))

    def factors_of_ranks(self) -> list[float] | None:
        """Returns the factor of each rank, where all gradients of a rank have one of its own."""
        factors = [self.common_factor([(rank, name) for name in of_rank]) for rank, of_rank in self.wanted.items()]
        known = [factor for factor in factors if factor is not None]
        return known if len(known) == len(factors) else None

    def difference(
        self, question: Question, quantity: str, cause: Message, *, step: int, holder: Holder, rank: int | None
    ) -> Finding:
        """Returns the finding that a gradient is apart. rank: which to name; None where it stands for all ranks."""
        wanted, found = self.pair(*holder)
        return differs(
            question,
            quantity,
            cause,
            step=step,
            tensor=holder[1],
            rank=rank,
            expected=message("a_norm", norm=norm(wanted)),
            found=message("a_norm", norm=norm(found)),
        )


class StepAgainstOne(Protocol):
    """One step of the ranks, beside the step of one process."""

    @property
    def number(self) -> int:
        """The number of the step."""

    @property
    def before(self) -> GradientComparison:
        """The gradients as the ranks have reduced them."""

    @property
    def after(self) -> GradientComparison | None:
        """The gradients that the optimizer took. None: nothing has clipped them."""

    @property
    def rounding(self) -> float:
        """How far the gradients are apart, as a distance of which it is asked whether rounding has grown to it."""

    def not_judged(self) -> Message | None:
        """Returns why a difference of the gradients before clipping tells nothing; None where it does."""

    def gradient_finding(self, *, came_apart: bool) -> Finding:
        """Returns the finding about gradients that are apart. came_apart: whether those of steps before were further
        apart than those of the first one, and within the bound of later steps."""

    def clipping_finding(self, after: GradientComparison) -> Finding:
        """Returns the finding about gradients that are apart since something has clipped them."""


def bound_of_step(coarser: float, *, is_later: bool) -> float:
    """Returns how far the gradient of a step may be from that of one process. coarser: as `coarser_of` returns it.
    is_later: whether the weights are not those of the beginning."""
    return (LATER_STEPS_APART if is_later else FIRST_STEP_APART) * coarser


def first_difference(steps: Iterable[StepAgainstOne | Finding]) -> tuple[Finding | None, float]:
    """Compares the gradients of each step with those of one process, until one is another one.

    steps: a finding in the place of a step says why it cannot be compared. Returns (the finding; None where no gradient
    is another one, the distance of the first step's gradients).
    """
    distances, first = list[float](), 0.0
    for step in steps:
        if isinstance(step, Finding):
            return step, first
        before, after = step.before, step.after
        if broken := before.not_finite(step.number) or (after and after.wanted_not_finite(step.number)):
            return Finding(GRADIENT, "unknown", broken), first
        first = first if distances else before.worst
        distances.append(step.rounding)
        if not before.apart and after and after.apart:
            return step.clipping_finding(after), first
        if not before.apart:
            continue
        if why := step.not_judged():
            return Finding(GRADIENT, "unknown", why), first
        if grown := grown_rounding(distances, step.number):
            return grown, first
        came_apart = any(distance > FIRST_STEP_APART for distance in distances[1:-1])
        return step.gradient_finding(came_apart=came_apart), first
    return None, first


def grown_rounding(distances: Sequence[float], step: int) -> Finding | None:
    """Returns that a step cannot be judged where the distances of the steps so far begin at the size of rounding and
    grow by no more than ROUNDING_GROWS a step.

    Training makes rounding grow that fast; a mistake has its whole size at the step that makes it.
    """
    grown = [max(distance, FLOAT32_ROUNDING) for distance in distances]
    slowly = all(after <= ROUNDING_GROWS * before for before, after in pairwise(grown))
    if len(distances) <= 2 or distances[0] > FIRST_ROUNDING or not slowly:
        return None
    shown = [float(f"{distance:.0e}") for distance in distances[-4:]]
    return Finding(GRADIENT, "unknown", message("rounding_grows", steps=step, distances=shown))
