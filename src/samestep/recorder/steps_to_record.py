"""Decides after which step a recording ends: the last that was asked for or, where the second epoch begins soon after,
the first step of that epoch. Then the order of another epoch is seen, and an evaluation between the two."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from samestep.job.foreign import answer
from samestep.recorder.loaders import Pass
from samestep.records.files import read, write
from samestep.records.script_plan import ScriptPlan, StepsWanted

WANTED = "steps-wanted-rank{}.json"
WAIT_S = 10.0  # for the others, of which one may take other steps and wait for this rank


class StepsToRecord:
    """The number of steps that all ranks record. passes: returns the passes over loaders so far."""

    def __init__(self, plan: ScriptPlan, rank: int, ranks: int, passes: Callable[[], list[Pass]]) -> None:
        self._asked, self._most, self._folder = plan.steps, plan.most_steps, Path(plan.out)
        self._rank, self._ranks, self._passes = rank, ranks, passes
        self._decided = 0

    def are_enough(self, steps: int) -> bool:
        """Returns whether the recording ends after so many steps. Ranks that come to the last asked step decide
        together whether they go on."""
        if steps < self._asked:
            return False
        if not self._decided:
            self._decided = self._decide(steps) if steps < self._most else steps
        return steps >= self._decided

    def _decide(self, steps: int) -> int:
        self._want(steps_to_second_epoch(self._passes(), steps, self._most))
        paths, until = [self._folder / WANTED.format(rank) for rank in range(self._ranks)], time.monotonic() + WAIT_S
        while not all(path.exists() for path in paths):
            if time.monotonic() > until:
                self._want(steps)  # a rank that comes later ends with this one
                return steps
            time.sleep(0.002)
        wanted = [read(StepsWanted, path) for path in paths]
        return steps if any(rank.ends for rank in wanted) else max(rank.steps for rank in wanted)

    def _want(self, steps: int) -> None:
        write(self._folder / WANTED.format(self._rank), StepsWanted(steps, ends=steps <= self._asked))


def steps_to_second_epoch(passes: list[Pass], steps: int, most: int) -> int:
    """Returns how many steps it takes until one of the second epoch is done; `steps` where it has begun, where that is
    not known, or where it takes more than `most`."""
    trained = [loader_pass for loader_pass in passes if loader_pass.trained]
    loaders = [loader_pass.loader for loader_pass in trained]
    if not trained or len({*loaders}) < len(loaders):
        return steps
    first = trained[0]
    batches = answer(lambda: len(first.iterator), None)
    if batches is None or not first.read:
        return steps
    needed = -(-batches * steps // first.read) + 1
    return needed if needed <= most else steps
