"""Keys the global random generators by sample, for datasets whose transforms draw from them.

Many transforms, torchvision's among them, draw from Python's `random`, numpy's global generator or torch's default one.
What these give depends on the process and on all that was drawn before, so that another number of ranks or of loader
workers would be another training. Here each sample is read with the generators seeded by (seed, epoch, index).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from samestep.data.schedule import key

Result = TypeVar("Result")


class KeyedRandom:
    """Seeds the global generators that a dataset draws from, and restores them.

    drawn: the names of those that it has drawn from so far. The others are neither seeded nor restored. Which these are
    is found by comparing all states before and after each batch.
    """

    def __init__(self) -> None:
        self.drawn: frozenset[str] = frozenset()

    def __call__(self, read: Callable[[], Result]) -> Result:
        """Returns read(), which calls seed() before each sample, and restores the generators.

        A read that is seen to draw from a generator for the first time is repeated, with this generator seeded.
        """
        while True:
            saved = {name: generator.state() for name, generator in GENERATORS.items()}
            try:
                result = read()
            finally:
                changed = {
                    name
                    for name, state in saved.items()
                    if name in self.drawn or not _same_state(state, GENERATORS[name].state())
                }
                for name in changed:
                    GENERATORS[name].restore(saved[name])
            if changed <= self.drawn:
                return result
            self.drawn |= changed

    def seed(self, *path: int | str) -> None:
        """Seeds the generators in `drawn` for a path such as (seed, 'sample', epoch, index)."""
        if self.drawn:
            number = key(*path)
            for name in self.drawn:
                GENERATORS[name].seed(number)


class GlobalGenerator(NamedTuple):
    """A global random generator. restore: takes what `state` returned."""

    seed: Callable[[int], Any]
    state: Callable[[], Any]
    restore: Callable[[Any], Any]


GENERATORS: Mapping[str, GlobalGenerator] = {
    "random": GlobalGenerator(random.seed, random.getstate, random.setstate),
    "numpy": GlobalGenerator(lambda number: np.random.seed(number % 2**32), np.random.get_state, np.random.set_state),
    # The generator itself: torch.manual_seed also queues a seed for CUDA, which takes 70 µs.
    "torch": GlobalGenerator(
        lambda number: torch.default_generator.manual_seed(number),
        torch.default_generator.get_state,
        lambda state: torch.default_generator.set_state(state),
    ),
}


def _same_state(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first[1], np.ndarray):  # numpy's state: a name, the keys, and numbers
        return bool(first[2:] == second[2:] and np.array_equal(first[1], second[1]))
    return bool(first == second)
