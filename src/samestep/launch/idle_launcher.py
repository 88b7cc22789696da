"""Detects a launcher that keeps running after all of its ranks have ended, or that would restart them in vain."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from samestep.launch import Machines
from samestep.launch.end import is_local_pid_file, live_local_ranks, local_pids
from samestep.records.record import Record

ENDING_S = 10.0  # after every rank has written its record: time for the launcher to exit
SETTLE_S = 1.5  # after all ranks have died: a launcher may wait minutes for other machines


class IdleLauncher:
    """Watches the launcher whose ranks on this machine write into `folder`."""

    def __init__(self, folder: Path, machines: Machines) -> None:
        self._folder, self._machines = folder, machines
        self._no_rank_since: float | None = None  # when the last rank on this machine ended

    def is_stuck(self) -> bool:
        """Whether the launcher has run for too long without a live rank, or would restart ranks that fail again.

        To be called repeatedly.
        """
        if self._is_users_mistake():
            return True
        if not local_pids(self._folder) or live_local_ranks(self._folder):
            self._no_rank_since = None
            return False
        self._no_rank_since = self._no_rank_since or time.monotonic()
        return time.monotonic() - self._no_rank_since > self._limit_s()

    def _is_users_mistake(self) -> bool:
        """Whether a rank has failed in a way in which restarted ones would fail, too. On several machines the others'
        launchers would wait for this one."""
        if not self._machines.max_restarts or self._machines.nnodes > 1:
            return False
        with suppress(FileNotFoundError):  # a restarted rank removes its old one
            error = Record(self._folder).error()
            return error is not None and error.kind in ("user", "refused")
        return False

    def _limit_s(self) -> float:
        machines = self._machines
        ranks = [path.name.removeprefix("pid-") for path in self._folder.glob("pid-rank*") if is_local_pid_file(path)]
        if all((self._folder / f"{rank}.json").exists() for rank in ranks):
            return ENDING_S if machines.nnodes == 1 else machines.timeout_s  # it waits for other machines' ranks
        return machines.timeout_s if machines.max_restarts else SETTLE_S  # the launcher may restart them
