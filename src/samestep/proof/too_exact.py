"""Checks whether an engine that was asked for float16 or bfloat16 computed in float32 all the same.

A hook that was never registered, or an autocast that is not in force, trains in float32 and says nothing. What is
rounded cannot be that exact: the reference's first gradient has elements that the lower precision cannot hold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from samestep.message import as_said
from samestep.proof.differences import BOUND, distance
from samestep.proof.plan import AS_NUMERICS
from samestep.proof.trace import Expectation, sample_like
from samestep.records.record import Record
from samestep.records.results import Divergence

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Values = NDArray[np.float64]

DIGITS = {"float16": 11, "bfloat16": 8}  # binary digits of what is below float32
FACTOR = 8  # times float32's own rounding and the ranks: an element whose loss of digits is larger must show it
ENOUGH = 16  # such elements: one alone may come out right by chance


def too_exact(loop: Expectation, numerics: Expectation, record: Record) -> Divergence | None:
    """The divergence of an engine that was asked for float16 or bfloat16, and whose first gradient is float32's.

    None wherever a healthy engine could look so: float32's rounding is not known (no float64), one rank alone sends
    nothing, autocast was in force (not every model has something that it lowers), or the gradient has too few
    elements in which the rounding would show.
    """
    precision, replicas = numerics.facts.rounds_to, numerics.facts.layout.replicas
    if precision not in DIGITS or numerics.facts.exact_steps or loop.facts.dtype != "float64" or replicas == 1:
        return None
    name = AS_NUMERICS.format("gradient")
    if any(rank.autocast for rank in record.training(name)):
        return None
    start, end, observed = numerics.start(), numerics.arrays("gradient"), record.arrays(name)
    alone, exact = (of.arrays("gradient", ".own") for of in (numerics, loop))
    informative = 0
    for tensor, own in alone.items():
        want, got = _float64(end[tensor]), _float64(observed[tensor])
        # Rounding of the gradient, measured on rank 0's own, and that of the weights from which it is read.
        read = np.spacing(np.maximum(np.abs(want), np.abs(got)).astype(np.float32))
        float32 = BOUND * distance(own, exact[tensor]) + 2 * _float64(read)
        if not (np.abs(want - got) <= float32).all():
            return None
        sampled = _float64(start[tensor]) - sample_like(want, own), _float64(own)
        lost = np.minimum(*(np.abs(values - _rounded(values, DIGITS[precision])) for values in sampled))
        informative += int((lost > FACTOR * replicas * sample_like(float32, own)).sum())
    if informative < ENOUGH:
        return None
    cause = f"asked for {precision} numerics, but computed in float32: the hook or the autocast is not in force"
    return Divergence("gradient", 0, "precision", None, None, precision, "float32", as_said(cause))


def _float64(values: Any) -> Values:
    return np.asarray(values, dtype=np.float64)


def _rounded(values: Values, digits: int) -> Values:
    """Values rounded to so many binary digits. The tiniest, which float16 holds with fewer, lose more than this."""
    mantissa, exponent = np.frexp(values)
    return np.asarray(np.ldexp(np.round(np.ldexp(mantissa, digits)), exponent - digits))
