"""Fits a gradient as a sum of others: how much of each it holds, as figures that a reader can check."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from samestep.bounds import DEPENDENT_COLUMNS, TOLD_APART

Array = NDArray[np.float64]
# Values for each weight: as many unknown weights as values fit anything.
LEAST = 4


class Multiple(NamedTuple):
    """A gradient as a multiple of another one. left: the norm of the difference between the two."""

    factor: float
    left: float


class Fit(NamedTuple):
    """A gradient as a weighted sum of columns.

    weights: one for each column. shape [columns]. left: the norm of what the sum leaves of the gradient. error: how far
    a weight may be off by that much; infinite where other weights give the same sum.
    """

    weights: Array
    left: float
    error: float


def norm(array: Array) -> float:
    return float(np.linalg.norm(array))


def multiple_of(gradient: Array, base: Array) -> Multiple:
    """Returns the multiple of another gradient that is nearest to this one; 0 times where the other is zero."""
    square = float(base @ base)
    factor = float(gradient @ base) / square if square else 0.0
    return Multiple(factor, norm(gradient - factor * base))


def is_times(factor: float, number: float) -> bool:
    """Returns whether a factor is a number, such as that of the ranks."""
    return abs(factor / number - 1) <= TOLD_APART


def count_in(factor: float, counts: Mapping[str, int]) -> tuple[str, bool] | None:
    """Returns (which count, such as that of the ranks, a factor is, whether it multiplies); None where it is none of
    them. A count of one is none."""
    for name, count in counts.items():
        if count > 1 and is_times(factor, count):
            return name, True
        if count > 1 and is_times(factor, 1 / count):
            return name, False
    return None


def fit(gradient: Array, columns: Sequence[Array], *, least: int = LEAST) -> Fit | None:
    """Returns the weighted sum of columns that is nearest to a gradient; None where its values are too few, or not
    finite.

    columns: of the gradient's shape. least: values of the gradient for each column.
    """
    if not columns or len(gradient) <= least * len(columns):
        return None
    together = np.stack(columns, axis=1)
    if not np.isfinite(together).all() or not np.isfinite(gradient).all():
        return None
    weights, _, _, singular = np.linalg.lstsq(together, gradient, rcond=None)
    left = norm(gradient - together @ weights)
    is_unique = singular[-1] > DEPENDENT_COLUMNS * singular[0]
    error = left / float(singular[-1]) if is_unique else math.inf
    return Fit(np.asarray(weights, dtype=np.float64), left, error)
