"""Steps that a rank takes alone, before the training that all take: a baseline, a teacher, a reference.

Steps count from the first one that all ranks take. Steps were taken alone where no collective was called in them, and
then the ranks meet to train another model; or where no other rank has taken any.
"""

from __future__ import annotations

import time
from pathlib import Path

from samestep.rank import flight_recorder
from samestep.records.script import STEP
from samestep.world import World
from samestep.world.regular_files import remove_file

WAIT_S = 2.0  # at least, for a step of another rank


class StepsAlone:
    """Finds out whether the recorded steps were taken alone. taken: how many steps were."""

    def __init__(self, folder: Path, world: World) -> None:
        self.taken = 0
        self._folder, self._world = folder, world
        self._made_ns = time.time_ns()
        self._began_ns = self._stepped_ns = 0

    def begin_forward(self) -> None:
        self._began_ns = self._began_ns or time.time_ns()

    def end_step(self) -> None:
        self._stepped_ns = time.time_ns()

    def end(self, steps: int) -> None:
        """Forgets the steps that were recorded, which were taken alone."""
        self.taken += steps
        self._began_ns = 0
        for path in self._folder.glob(f"rank{self._world.rank}.{STEP.format('*')}.npz"):
            remove_file(path)

    def were_before_meeting(self) -> bool:
        """Returns whether this rank has met the others since the last step, for the first time since the first step
        began."""
        if self._world.size == 1:
            return False
        called_ns = self._called_ns()
        return bool(called_ns) and min(called_ns) > self._stepped_ns

    def are_no_others(self) -> bool:
        """Waits for as long as this rank has run so far. Returns whether no other rank took a step or ended
        meanwhile."""
        if self._world.size == 1 or self._called_ns():
            return False
        until = time.monotonic() + max(WAIT_S, (self._stepped_ns - self._made_ns) / 1e9)
        while time.monotonic() < until:
            if any(self._has_moved(rank) for rank in range(self._world.size) if rank != self._world.rank):
                return False
            time.sleep(0.02)
        return True

    def _called_ns(self) -> list[int]:
        """Returns when collectives were called since the first step began."""
        return [entry.time_created_ns for entry in flight_recorder.read() if entry.time_created_ns > self._began_ns]

    def _has_moved(self, rank: int) -> bool:
        names = (f"rank{rank}.{STEP.format(0)}.npz", f"rank{rank}.json", f"error-rank{rank}.json")
        return any((self._folder / name).exists() for name in names)
