"""The rate of the proof's SGD: neither so high that a loss explodes, nor so low that the weights hardly move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log

RATES = 24  # tried, each a quarter of the previous one: a loss may be a sum over millions
EXPLODES = 10  # a loss above this multiple of the first step's largest
HARDLY_MOVES = 1e-5  # the gradient's norm times the rate: rounding would hide what is compared
MOVES = 1e-3  # the same, at the rate that is then taken


class Exploded(RuntimeError):
    """The losses of a training explode."""


class TooFast(Exception):
    """The losses explode, and there is a lower rate to try."""


def end_at_explosion(phases: int) -> Callable[[int, list[float]], None]:
    """Returns a function of each step and its losses that raises Exploded once one is far above the first steps', as
    many as there are phases."""
    largest: list[float] = []

    def after_step(step: int, losses: list[float]) -> None:
        largest.append(max(map(abs, losses)))
        if step >= phases and largest[-1] > EXPLODES * max(largest[:phases]):
            raise Exploded

    return after_step


def rate_that_moves(rate: float, norms: Sequence[float]) -> float:
    """Returns `rate`, or a higher one where the gradients of these norms hardly move the weights, as those of a tiny
    loss. norms: of the gradient, at each step."""
    moves = rate * max(norms)
    return rate * 4.0 ** round(log(MOVES / moves, 4)) if 0 < moves < HARDLY_MOVES else rate
