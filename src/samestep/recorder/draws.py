"""Random numbers that a script draws with torch's functions between its loader and its loss, and not in the model.

A recording keeps them, so that a replay can give one process what all ranks together have drawn: a GAN's noise, a
diffusion model's times and noise, smoothed labels. There is a list for each event, which is the start of a training
forward or of a backward pass: what is drawn before it, since the event before or the latest batch that was read. What
is drawn before a batch is read (a sampler's order, in an evaluation) is in no list.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from samestep.recorder.patches import in_backward

RAND = ["rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like"]
FUNCTIONS = [*RAND, "normal", "bernoulli", "multinomial", "poisson"]
METHODS = ["normal_", "uniform_", "random_", "bernoulli_", "exponential_", "bernoulli", "multinomial"]


@dataclass
class Drawn:
    """What was drawn before one event. after_read: whether a batch was read before it, after the event before."""

    values: list[Tensor] = field(default_factory=list)
    after_read: bool = False


def patch_draws(around: Callable[[Callable[[], Tensor]], Tensor]) -> None:
    """Calls around(call) for each of torch's functions that draw random numbers, instead of it."""
    for name in FUNCTIONS:
        _patch(torch, name, around)
    for name in METHODS:
        _patch(Tensor, name, around)


def _patch(of: Any, name: str, around: Callable[[Callable[[], Tensor]], Tensor]) -> None:
    draw = getattr(of, name)

    @functools.wraps(draw)
    def new_draw(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or in_backward():
            return draw(*args, **kwargs)
        return around(functools.partial(draw, *args, **kwargs))

    setattr(of, name, new_draw)


def joined_draws(parts: Sequence[Tensor], shape: torch.Size) -> Tensor | None:
    """Returns what one process draws in the place of several ranks: numbers for all rows, or those of every rank.

    None where each rank has drawn other ones for all of its rows.
    """
    first = parts[0]
    rows = shape and all(each.dim() and each.shape[1:] == shape[1:] for each in parts)
    if rows and sum(map(len, parts)) == shape[0]:
        return torch.cat(list(parts))
    same = all(torch.equal(first, each) for each in parts)
    return first if same and first.shape == shape else None
