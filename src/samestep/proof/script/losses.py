"""With which weight the losses of all ranks and micro-batches enter one step's gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from samestep.records.script import LossSeen, MicroSeen

NEAR = 1e-3


@dataclass(frozen=True)
class LossWeight:
    """The weight of one micro-batch's loss. largest: of its terms; together: of all of them."""

    largest: float
    together: float


def loss_weights(terms: Sequence[LossSeen]) -> LossWeight | None:
    """Returns the weight of a loss; None where a term is not known. A sum counts as so many means of one value."""
    if not terms or any(term.reduction == "unknown" for term in terms):
        return None
    each = [_of_means(term) for term in terms]
    return LossWeight(max(each, key=abs), sum(each))


def _of_means(term: LossSeen) -> float:
    return term.weight * (term.count if term.reduction == "sum" else 1)


def alike(weights: Sequence[Sequence[LossWeight | None]]) -> bool:
    """Whether the losses of all ranks and micro-batches have the same weight."""
    each = [weight.largest for of_rank in weights for weight in of_rank if weight]
    return bool(each) and max(each) - min(each) <= NEAR * max(each)


def several_losses(micros: Sequence[MicroSeen], loaders: Sequence[int]) -> bool:
    """Whether the micro-batches of a step are terms of one loss, each with its own backward(), and no accumulation.

    They are of the same rows, of other kinds of losses, or of several loaders; their weights need not add up to one.
    loaders: pass over a loader -> the loader.
    """
    rows = [frozenset(micro.rows) for micro in micros if micro.rows]
    kinds = {tuple(term.kind for term in micro.losses) for micro in micros}
    of = {frozenset(loaders[number] for number in micro.passes if number < len(loaders)) for micro in micros}
    return len(rows) > len({*rows}) or len(kinds) > 1 or len(of) > 1


def total_weight(
    weights: Sequence[Sequence[LossWeight | None]], factor: float, near_one: Callable[[float], bool]
) -> float:
    """Returns the factor of the gradients' sum times the weights of all losses; 1 in a weighted mean."""
    known = [weight for each in weights for weight in each if weight]
    largest = factor * sum(weight.largest for weight in known)
    together = factor * sum(weight.together for weight in known)
    return together if near_one(together) else largest


def targets(micros: Sequence[Sequence[MicroSeen]]) -> tuple[int, float] | None:
    """Returns (rank, how much more a target weighs there than on rank 0), where ranks with unequal numbers of targets,
    or of micro-batches, weigh them unequally in the same micro-batch; None where they do not."""
    for of in zip(*micros):
        if any(len(micro.losses) != 1 or not micro.losses[0].count for micro in of):
            continue
        counts = [micro.losses[0].count for micro in of]
        each = [_of_means(micro.losses[0]) / micro.losses[0].count for micro in of]
        for rank, weight in enumerate(each):
            uneven = counts[rank] != counts[0] or len(micros[rank]) != len(micros[0])
            if each[0] and uneven and abs(weight / each[0] - 1) > NEAR:
                return rank, weight / each[0]
    return None


def accumulated_targets(micros: Sequence[MicroSeen]) -> tuple[int, float] | None:
    """Returns (micro-batch, how much more a target weighs there than in the first), of micro-batches with as many rows
    each, but other numbers of targets; None where they weigh the same. A shorter last batch is not judged."""
    of = [micro for micro in micros if len(micro.losses) == 1 and micro.losses[0].count and micro.rows]
    if len(of) < len(micros) or len({len(micro.rows) for micro in of}) > 1:
        return None
    counts = [micro.losses[0].count for micro in of]
    each = [_of_means(micro.losses[0]) / count for micro, count in zip(of, counts)]
    for number, weight in enumerate(each):
        if each[0] and counts[number] != counts[0] and abs(weight / each[0] - 1) > NEAR:
            return number, weight / each[0]
    return None


@dataclass(frozen=True)
class Scaling:
    """How gradients are scaled. factor: of their sum over ranks and micro-batches, without a gradient scaler's.

    size: ranks. micro: micro-batches of this step; most: of any step.
    """

    factor: float
    size: int
    micro: int
    most: int

    @property
    def reduced(self) -> float:
        """The factor of the mean over ranks: 1 where the gradients are averaged."""
        return self.factor * self.size

    @property
    def is_mean(self) -> bool:
        return self.near_one(self.reduced)

    @staticmethod
    def near_one(value: float) -> bool:
        return abs(value - 1) < NEAR

    def cause(self, own: float) -> str:
        """Returns why the weights do not add up to one; '' where no known mistake explains it.

        own: the weights of one rank's losses, added up over its micro-batches: 1 where each is divided by their number.
        """
        n, size = self.micro, self.size
        if size > 1 and self.near_one(self.reduced / size):
            return f"the gradients are added up over the {size} ranks, and not divided by their number"
        if size > 1 and self.near_one(self.reduced * size):
            return f"averaged twice: the reduced gradients are divided by the {size} ranks once more"
        if n > 1 and self.near_one(self.reduced * n) and self.near_one(own):
            return f"the losses are divided by the {n} micro-batches twice"
        if not self.is_mean:
            return ""
        if n > 1 and self.near_one(own / n):
            return (
                f"the losses of {n} accumulated micro-batches are not divided by {n}: the step is {n} times too large"
            )
        if n < self.most and self.near_one(own * self.most / n):
            return (
                f"the last window has {n} micro-batches of {self.most}, and is divided by {self.most}: the step "
                "is too small"
            )
        if n > 1 and self.near_one(own * n):
            return f"the losses are divided by the {n} micro-batches twice"
        if self.near_one(own * size):
            return f"averaged twice: the loss is divided by the {size} ranks, and the gradients are averaged as well"
        if self.near_one(own / size):
            return (
                f"the loss is multiplied by the {size} ranks, and the gradients are averaged: their sum, not the mean"
            )
        return ""
