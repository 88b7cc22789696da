"""Names the usual cause of a wrong first gradient: summed, scaled, clipped, rounded, or one rank's own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from samestep.proof.trace import EPS, Expectation, Trace, sample_like

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Gradients = Mapping[str, NDArray[Any]]

ALIKE = 1e-6  # two gradients are one, this share of the largest element apart
ULPS = 8  # or so many units in the last place, of the gradient as it travels and of the weights that it is read from
CLIPPED_TO = 1.0  # the default of libraries that clip unasked


def cause(expectation: Expectation, expected: Trace, observed: Trace) -> str:
    """Names the cause from samples of all tensors of the gradient, once one of them differs."""
    alone = expectation.arrays("gradient", ".own")
    start = expectation.start()
    last, theirs = (
        {name: sample_like(state[name], own) for name, own in alone.items()}
        for state in (expected.state, observed.state)
    )
    want = {name: start[name] - last[name] for name in alone}
    got = {name: start[name] - theirs[name] for name in alone}
    size = max(np.abs(values).max() for values in want.values())
    real = [name for name in alone if np.abs(want[name]).max() > 1e-9 * size]  # others are rounding around zero
    slack = {name: _slack(expectation, start[name], want[name]) for name in alone}
    moved = [n for n in alone if n not in real and np.abs(got[n]).max() > max(1e-6 * size, slack[n])]
    if moved:
        return f"{', '.join(moved[:3])}: should not move and does: a frozen parameter is trained, or decay is applied"

    def alike(name: str, theirs: Any) -> bool:
        return bool(np.abs(got[name] - theirs).max() <= slack[name])

    ratio = _ratio(want, got, real)
    if all(alike(name, ratio * want[name]) for name in real):
        return _scaled(expectation, ratio, math.sqrt(sum(float((got[name] ** 2).sum()) for name in real)))
    wrong = [name for name in real if not alike(name, want[name])]
    if wrong and all(alike(name, alone[name]) for name in wrong):
        if len(wrong) == len(real):
            return "the gradients are rank 0's own: they are never reduced, or the result is thrown away"
        return f"{', '.join(wrong[:3])}: rank 0's own gradient, left out of the reduction"
    before = expectation.arrays("gradient", ".before_last")
    if before:
        own = expectation.arrays("gradient", ".own_before_last")
        if all(alike(name, want[name] - before[name]) for name in real):
            return "the gradient is the last micro-batch's alone: the others' never ran backward, or were cleared"
        if all(alike(name, before[name] + alone[name] - own[name]) for name in real):
            return "right but for the last micro-batch, whose gradient is rank 0's own: no_sync is the wrong way round"
    off = {name: np.abs(want[name] - got[name]).max() / np.abs(want[name]).max() for name in real}
    worst = max(off, key=lambda name: off[name])
    if off[worst] >= 1e-2 and len(wrong) < len(real):
        return f"{', '.join(wrong[:3])}: wrong alone, the others are right: look at what the engine does with {worst}"
    if off[worst] < 1e-2:
        return f"right to {off[worst]:.0e} only: gradients are rounded to a lower precision on their way"
    return (
        "no multiple of the right gradient: a rank's or a micro-batch's part is missing, counted twice, or weighs as "
        "much as one of more rows"
    )


def _slack(expectation: Expectation, start: Any, want: Any) -> float:
    """How far rounding may move one tensor: of the gradient on its way, and of the weights that it is read from."""
    of_gradient, largest = expectation.eps, float(np.abs(want).max())
    of_weights = min(of_gradient, EPS["float32"])  # weights themselves stay float32 or wider
    return max(ALIKE * largest, ULPS * (of_gradient * largest + of_weights * float(np.abs(start).max())))


def _ratio(want: Gradients, got: Gradients, names: list[str]) -> float:
    """The one number that the whole gradient is multiplied by, if it is one."""
    products = sum(float((want[name] * got[name]).sum()) for name in names)
    return products / sum(float((want[name] ** 2).sum()) for name in names)


def _scaled(expectation: Expectation, ratio: float, norm: float) -> str:
    """The cause of a gradient that is `ratio` times the right one; norm: what it has become."""
    replicas = expectation.facts.layout.replicas
    close = max(1e-5, ULPS * expectation.eps)
    if math.isclose(ratio, replicas, rel_tol=close):
        return f"every gradient is {replicas} times too large: summed over the ranks, not averaged"
    if math.isclose(ratio, 1 / replicas, rel_tol=close):
        return f"every gradient is {replicas} times too small: averaged twice"
    if math.isclose(ratio, 1.0, rel_tol=1e-3):
        return "right but for its last digits: gradients or weights are rounded to a lower precision on their way"
    if abs(ratio) < 1e-8:
        return "the weights do not move: the optimizer holds other parameters than the model that is trained"
    for limit in (CLIPPED_TO, expectation.facts.clip_norm):
        if limit is not None and ratio < 1 and math.isclose(norm, limit, rel_tol=1e-3):
            return (
                f"every gradient is {ratio:.6g} times the right one, and their norm is {norm:.4g}: clipped, where this "
                "training clips nothing (some libraries clip at 1 unless they are told not to)"
            )
    return f"every gradient is {ratio:.6g} times the right one: the loss is scaled by another factor"
