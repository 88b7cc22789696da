"""A launcher that goes on though none of its ranks lives: how long that may take, before it is ended."""

from __future__ import annotations

import time
from pathlib import Path

from samestep.launch import Machines
from samestep.launch.end import is_here, pids_here, ranks_here

ENDING_S = 10.0  # after every rank has written its record
SETTLE_S = 1.5  # after all have died; torchrun would wait minutes for other machines


class IdleLauncher:
    """Watches the ranks of `folder` on this machine."""

    def __init__(self, folder: Path, machines: Machines) -> None:
        self._folder, self._machines = folder, machines
        self._since: float | None = None  # no rank lives here since then

    def waits_in_vain(self) -> bool:
        """Whether it has gone on for too long without a living rank. Call it again and again."""
        if not pids_here(self._folder) or ranks_here(self._folder):
            self._since = None
            return False
        self._since = self._since or time.monotonic()
        return time.monotonic() - self._since > self._patience_s()

    def _patience_s(self) -> float:
        machines = self._machines
        here = [path.name.removeprefix("pid-") for path in self._folder.glob("pid-rank*") if is_here(path)]
        if all((self._folder / f"{rank}.json").exists() for rank in here):
            return ENDING_S if machines.nnodes == 1 else machines.timeout_s  # torchrun waits for other machines' ranks
        return machines.timeout_s if machines.max_restarts else SETTLE_S  # it may start them again
