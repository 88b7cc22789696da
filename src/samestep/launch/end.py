"""Ends a launch's process tree: by pid, never by name."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil

from samestep import launch
from samestep.errors import TrainingFailed
from samestep.launch import Machines, fork_client
from samestep.launch.fork_client import ForkedWorker
from samestep.launch.stacks import sizes, wait_until_written
from samestep.message import message
from samestep.records.record import Record
from samestep.world.processes import COMMAND, KILLED_S, this_command
from samestep.world.regular_files import paths_in

Tree = subprocess.Popen[bytes] | ForkedWorker  # the process of a launch from which all others descend

GRACE_S = 3.0  # between SIGTERM and SIGKILL
NO_RANKS_GRACE_S = 0.5  # the same, where no rank is alive that could have something to save


def end_tree(tree: Tree, folder: Path, *, is_last: bool = True) -> None:
    """Ends a process and all its descendants: SIGTERM, then SIGKILL.

    folder: of the ranks, with their pid files. is_last: whether no other launch of this command goes on; only then can
    what a launch has left be told from what one has started, and the last one ends all that is left.
    """
    if tree.poll() is None:
        root = psutil.Process(tree.pid)
        no_rank_lives = bool(local_pids(folder)) and not live_local_ranks(folder)  # the launcher waits for none
        _end([*root.children(recursive=True), root], NO_RANKS_GRACE_S if no_rank_lives else GRACE_S)
        with suppress(subprocess.TimeoutExpired):  # a disk that does not answer holds a killed process
            tree.wait(KILLED_S)
    # A killed launcher may leave ranks that are not its children (Slurm's daemon starts them), and a killed rank may
    # leave processes that it started.
    if is_last:
        running = (process for process in psutil.process_iter() if process.pid != os.getpid())
        _end([process for process in running if _started_by_this_command(process)], GRACE_S)
    if tree.returncode != 0:
        for launcher in launch.all_launchers().values():
            launcher.end(folder)


def _end(members: list[psutil.Process], grace_s: float) -> None:
    for member in members:
        _signal(member, signal.SIGTERM)
    _, alive = psutil.wait_procs(members, timeout=grace_s)
    for member in alive:
        _signal(member, signal.SIGKILL)
    psutil.wait_procs(alive, timeout=GRACE_S)


def _signal(process: psutil.Process, number: int) -> None:
    with suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def _started_by_this_command(process: psutil.Process) -> bool:
    """Whether this command started `process`, by its environment: the kernel may have reused a pid."""
    if process.pid in fork_client.pids():
        return False
    with suppress(psutil.Error):
        return bool(process.environ().get(COMMAND) == this_command())
    return False


def live_local_ranks(folder: Path) -> list[psutil.Process]:
    """Returns the ranks of `folder` that are alive on this machine."""
    ranks = []
    for pid in local_pids(folder):
        with suppress(psutil.NoSuchProcess):
            rank = psutil.Process(pid)
            if rank.status() != psutil.STATUS_ZOMBIE:
                ranks.append(rank)
    return ranks


def local_pids(folder: Path) -> list[int]:
    """Returns the pids of the ranks of `folder` on this machine, alive or not."""
    pids = []
    for path in paths_in(folder, "pid-rank*"):
        with suppress(OSError):  # the folder may be removed at any time
            if is_local_pid_file(path):
                pids.append(int(path.read_text().partition("@")[0]))
    return [*dict.fromkeys(pids)]  # ranks that are threads share a process


def is_local_pid_file(path: Path) -> bool:
    """Whether a rank's pid file was written on this machine, and is complete."""
    try:
        pid, _, host = path.read_text().partition("@")
    except FileNotFoundError:
        return False
    return bool(pid) and host == socket.gethostname()


def signal_ranks(folder: Path, number: int) -> None:
    """Sends a signal to the ranks of `folder` that are alive on this machine."""
    for rank in live_local_ranks(folder):
        _signal(rank, number)


class Deadline:
    """A time limit that starts now. seconds: None: no limit. folder: of the ranks, for stack-rankR.txt."""

    def __init__(self, seconds: float | None, folder: Path) -> None:
        self._seconds, self._folder, self._started_at = seconds, folder, time.monotonic()

    def is_over(self) -> bool:
        return self._seconds is not None and time.monotonic() - self._started_at > self._seconds

    def fail(self) -> None:
        """Makes each rank write its stack, and raises TrainingFailed."""
        before = sizes(paths_in(self._folder, "stack-rank*.txt"))
        signal_ranks(self._folder, signal.SIGUSR1)
        wait_until_written(before)
        raise TrainingFailed(message("launch_reached_its_deadline", seconds=self._seconds, folder=self._folder))


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
        ranks = [
            path.name.removeprefix("pid-") for path in paths_in(self._folder, "pid-rank*") if is_local_pid_file(path)
        ]
        if all((self._folder / f"{rank}.json").exists() for rank in ranks):
            return ENDING_S if machines.nnodes == 1 else machines.timeout_s  # it waits for other machines' ranks
        return machines.timeout_s if machines.max_restarts else SETTLE_S  # the launcher may restart them
