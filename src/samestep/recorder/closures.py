"""Counts the calls of an optimizer's closure, in a file that is there also where the script then fails or hangs."""

from __future__ import annotations

from pathlib import Path

from samestep.records.files import write
from samestep.records.script import CLOSURES, ClosuresSeen


class Closures:
    """The calls of one rank. A closure that is called once a step, as Lightning's, is in no file."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = folder / CLOSURES.format(rank)
        self._calls: list[int] = []
        self._several = False

    def count(self, step: int, calls: int, done: bool = False) -> None:
        """Notes how many calls a step has had by now. done: whether the step has ended."""
        self._calls = [*self._calls[:step], *[0] * (step - len(self._calls)), calls]
        self._several = self._several or calls > 1
        if self._several:
            write(self._path, ClosuresSeen(self._calls, step + done))
