"""Computes, from the gradients that ranks step with, the weights of each rank's own gradients in them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from samestep.bounds import BY_NUMBERS_OF_ROWS, RATE_APART, TIMES_ERROR, TOLD_APART, WEIGHTS_OF_MEAN
from samestep.judge.findings import Ranks
from samestep.judge.fit import Array, fit, norm
from samestep.judge.step_gradients import StepGradients
from samestep.message import Message, message
from samestep.records.script import MicroBatchRecord

# The findings that stand for uneven weights.
OF_WEIGHTS = ("gradient_of_some_ranks", "ranks_weigh_unequally", "micro_batches_weigh_unequally")
# Values of a fit for each weight: more say nothing new, and take the memory of all ranks' gradients.
MOST = 256


@dataclass(frozen=True)
class GradientWeights:
    """The weights of the ranks' own gradients in the gradient that each rank steps with.

    shares: [rank that steps] -> of all ranks' micro-batches, together 1. shape [ranks, micro-batches]. totals: [rank
    that steps] -> the sum of the weights. error: of one share. are_all: whether all gradients weigh so.
    """

    shares: Sequence[Array]
    totals: Sequence[float]
    error: float
    are_all: bool

    @classmethod
    def read(cls, gradients: StepGradients) -> GradientWeights | None:
        """Returns the weights that give all gradients which are not the mean; None where none do, or many."""
        names = [*dict.fromkeys(name for _, name in gradients.not_mean)]
        parts = [zip(*(local[name] for name in names)) for local in gradients.local]
        columns = [np.concatenate(micro_batch) for of_rank in parts for micro_batch in of_rank]
        every = max(1, len(columns[0]) // (MOST * len(columns)))
        columns = [column[::every] for column in columns]
        shares, totals, error = list[Array](), list[float](), 0.0
        for reduced in gradients.reduced:
            fitted = fit(np.concatenate([reduced[name] for name in names])[::every], columns)
            if fitted is None or not math.isfinite(fitted.error):
                return None
            total = float(fitted.weights.sum())
            sizes = sum(abs(weight) * norm(column) for weight, column in zip(fitted.weights, columns))
            if total <= 0 or fitted.left > gradients.close * sizes:
                return None
            shares.append(fitted.weights.reshape(gradients.size, -1) / total)
            totals.append(total)
            error = max(error, TIMES_ERROR * fitted.error / total)
        are_all = len(gradients.not_mean) == len(gradients.names) * gradients.size
        return cls(shares, totals, error, are_all) if error < WEIGHTS_OF_MEAN else None

    def cause(self) -> Message | None:
        """Returns why these are no means over all ranks and micro-batches; None where every weight is even."""
        for rank, shares in enumerate(self.shares):
            of_ranks = shares.sum(1)
            some = [number for number, share in enumerate(of_ranks) if abs(share) * len(of_ranks) > WEIGHTS_OF_MEAN]
            if len(some) < len(of_ranks):
                return message("gradient_of_some_ranks", rank=rank, ranks=some, size=len(of_ranks))
        for rank, shares in enumerate(self.shares):
            if self._is_uneven(of_ranks := shares.sum(1)):
                return message("ranks_weigh_unequally", rank=rank, shares=_rounded(of_ranks), even=1 / len(of_ranks))
            if self._is_uneven(parts := shares.sum(0)):
                return message("micro_batches_weigh_unequally", shares=_rounded(parts), even=1 / len(parts))
        return None

    def _is_uneven(self, shares: Array) -> bool:
        return bool(np.ptp(shares) * len(shares) > max(TOLD_APART, self.error * shares.size))

    def are_mean_over_all(self, ranks: Ranks, step: int) -> bool:
        """Returns whether all ranks step with the mean over all rows or targets, where each rank's loss is a mean of
        its own: each of its gradients then weighs by its number of them."""
        numbers = [[_divisor(batch) for batch in rank.steps[step].micro_batches] for rank in ranks]
        if any(len(of_rank) != self.shares[0].shape[1] or None in of_rank for of_rank in numbers):
            return False
        if not self.are_all or max(self.totals) - min(self.totals) > TOLD_APART * max(self.totals):
            return False
        counts = np.array(numbers, dtype=np.float64)
        wanted = counts / max(1.0, counts.sum())
        near = BY_NUMBERS_OF_ROWS * np.minimum(wanted, np.abs(wanted - 1 / wanted.size).max()) + self.error
        return all((np.abs(shares - wanted) <= near).all() for shares in self.shares)


def _divisor(batch: MicroBatchRecord) -> int | None:
    """Returns of how many rows or targets a micro-batch's loss is the mean; None where it is no mean."""
    divisors = set[int]()
    for term in batch.losses:
        is_mean = term.reduction == "mean" or math.isclose(abs(term.weight) * term.count, 1, rel_tol=RATE_APART)
        if term.reduction == "unknown" or (is_mean and not term.count):
            divisors.add(len(batch.rows))
        elif is_mean:
            divisors.add(term.count)
        else:
            return None
    return divisors.pop() if len(divisors) == 1 else len(batch.rows) if not divisors else None


def are_of_numbers(micro_batches: Sequence[Sequence[MicroBatchRecord]], shares: Array) -> bool:
    """Returns whether the shares are in proportion to something that the micro-batches of the ranks have a number of,
    as rows or targets. The shares of a root or a logarithm of a mean are not, though they add up to one, too.
    micro_batches: [rank] -> of one step. shares: together 1. shape [ranks, micro-batches].
    """
    near = BY_NUMBERS_OF_ROWS * np.abs(shares - 1 / shares.size).max()
    numbers = [[_numbers(batch) for batch in of_rank] for of_rank in micro_batches]
    for number in range(min(len(of_batch) for of_rank in numbers for of_batch in of_rank)):
        counts = np.array([[of_batch[number] for of_batch in of_rank] for of_rank in numbers], dtype=np.float64)
        if counts.sum() and (np.abs(counts / counts.sum() - shares) <= near).all():
            return True
    return False


def _numbers(batch: MicroBatchRecord) -> list[int]:
    """Returns how many rows, terms and targets a micro-batch has, and by which whole numbers its loss is divided."""
    divisors = [1 / factor for term in batch.losses for factor in term.factors if factor]
    whole_divisors = [
        round(divisor) if math.isclose(divisor, round(divisor), rel_tol=RATE_APART) else 0 for divisor in divisors
    ]
    return [len(batch.rows), len(batch.losses), *(term.count for term in batch.losses), *whole_divisors]


def _rounded(shares: Array) -> list[float]:
    return [round(float(share), 4) for share in shares]
