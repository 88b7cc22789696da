"""Ending a tree of processes: by pid, never by name."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from contextlib import suppress
from pathlib import Path

import psutil

from samestep import launch
from samestep.launch import fork_client
from samestep.launch.fork_client import ForkedWorker
from samestep.world.orphans import COMMAND, this_command

GRACE_S = 3.0  # between asking a tree to end and killing it
ALONE_S = 0.5  # the same, where no rank lives that could have something to save


def end(tree: subprocess.Popen[bytes] | ForkedWorker, folder: Path) -> None:
    """Ends a process and all that it started: asks, waits, kills. folder: of the ranks, whose pids are there."""
    if tree.poll() is None:
        root = psutil.Process(tree.pid)
        alone = bool(pids_here(folder)) and not ranks_here(folder)  # a launcher that waits for what will not come
        _end([*root.children(recursive=True), root], ALONE_S if alone else GRACE_S)
        tree.wait()
    # A launcher that was killed may leave ranks that are not its children (Slurm's are its daemon's).
    # Nor is what a rank had started, when that rank was killed.
    _end([process for process in psutil.process_iter() if process.pid != os.getpid() and _is_ours(process)], GRACE_S)
    if tree.returncode != 0:
        for end_ranks in (getattr(launch.load(name), "end", None) for name in launch.names()):
            if end_ranks:
                end_ranks(folder)


def _end(members: list[psutil.Process], grace_s: float) -> None:
    for member in members:
        _signal(member, signal.SIGTERM)
    _, left = psutil.wait_procs(members, timeout=grace_s)
    for member in left:
        _signal(member, signal.SIGKILL)
    psutil.wait_procs(left, timeout=GRACE_S)


def _signal(process: psutil.Process, number: int) -> None:
    with suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def _is_ours(process: psutil.Process) -> bool:
    """Whether it was started by this very command: a pid may be another's by now."""
    if process.pid in fork_client.pids():
        return False
    with suppress(psutil.Error):
        return bool(process.environ().get(COMMAND) == this_command())
    return False


def ranks_here(folder: Path) -> list[psutil.Process]:
    """The ranks of `folder` that live on this machine."""
    ranks = []
    for pid in pids_here(folder):
        with suppress(psutil.NoSuchProcess):
            rank = psutil.Process(pid)
            if rank.status() != psutil.STATUS_ZOMBIE:
                ranks.append(rank)
    return ranks


def pids_here(folder: Path) -> list[int]:
    """The pids that the ranks of `folder` on this machine have, or had."""
    return [int(path.read_text().partition("@")[0]) for path in folder.glob("pid-rank*") if is_here(path)]


def is_here(path: Path) -> bool:
    """Whether a rank's pid file was written on this machine, and whole."""
    pid, _, host = path.read_text().partition("@")
    return bool(pid) and host == socket.gethostname()


def signal_ranks(folder: Path, number: int) -> None:
    """Sends a signal to the ranks on this machine."""
    for rank in ranks_here(folder):
        _signal(rank, number)
