"""Supervising a launch: one process tree that ends when we end, its output in files."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from samestep.errors import say
from samestep.launch import Command, Machines, first_error, fork_client, oom_kills
from samestep.launch.deadline import Deadline
from samestep.launch.end import end
from samestep.launch.fork_client import ForkedWorker
from samestep.launch.idle_launcher import ENDING_S, IdleLauncher
from samestep.launch.stale_locks import clear_stale_locks
from samestep.launch.stop_requests import StopRequests
from samestep.records.record import Progress, Record, read_progress
from samestep.world.orphans import COMMAND, die_with_parent, this_command


def run(
    command: Command,
    folder: Path,
    size: int,
    *,
    deadline_s: float | None = None,
    watch: Callable[[Progress], None] | None = None,
    machines: Machines = Machines(),  # noqa: B008 - frozen
    graceful: bool = False,
) -> Record:
    """Starts `command`, waits for its end, returns the record of the `size` ranks that write into `folder`.

    watch: given what they tell, about ten times a second. deadline_s: after it, each rank's stack goes to
    stack-rankR.txt in `folder` and the tree is killed. graceful: an interrupt asks the ranks to stop after a step; a
    second one ends them. Raises UserError or TrainingFailed with the first failing rank's own sentence. However this
    function ends, the tree has ended too.
    """
    for lock in clear_stale_locks(os.environ):
        say(f"removed {lock}, which a killed build had left")
    killed_before = oom_kills.kills()
    deadline, idle = Deadline(deadline_s, folder), IdleLauncher(folder, machines)
    tree = start(command, folder, machines)
    requests = StopRequests(folder, accepted=graceful)
    try:
        while tree.poll() is None and not idle.waits_in_vain():
            try:
                progress = read_progress(folder) if watch or graceful else Progress()
                if watch:
                    watch(progress)
                requests.pass_on(progress)
                if deadline.is_over() and tree.poll() is None:  # looking at what they print takes time too
                    deadline.fail()
                time.sleep(0.1 if watch else 0.02)
            except KeyboardInterrupt:
                if not requests.interrupted(read_progress(folder)):
                    raise
    finally:
        end(tree, folder)
    code = tree.returncode if tree.returncode is not None else -signal.SIGKILL
    if code == 0 and machines.nnodes > 1 and not list(folder.glob("error-rank*")):
        _await_records(folder, size)
    record = Record(folder)
    first_error.raise_if_failed(record, code, size, machines, oom_kills.kills() - killed_before)
    return record


def start(command: Command, folder: Path, machines: Machines) -> subprocess.Popen[bytes] | ForkedWorker:
    """Starts a launch's command, what it prints appended to log.txt in `folder`."""
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # it warns that addresses have no names
    environment = quiet | os.environ | {"PYTHONUNBUFFERED": "1", COMMAND: this_command()} | dict(command.env)
    own = f"-{socket.gethostname()}" if machines.nnodes > 1 else ""  # the folder may be shared
    log = folder / f"log{own}.txt"
    arguments = command.argv[3:]  # after python -m samestep.worker
    if command.fork and (worker := fork_client.fork(command.fork, arguments, environment, log)):
        return worker
    with open(log, "ab") as output:
        return subprocess.Popen(
            command.argv,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C reaches us alone; we end the tree
            preexec_fn=partial(_born, command.ends_by) if sys.platform != "win32" else None,
        )


def _born(ends_by: signal.Signals) -> None:
    """In the new process, before it becomes the launcher."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # Slurm sends it to every process of a step; launchers die of it
    die_with_parent(by=ends_by)


def _await_records(folder: Path, size: int) -> None:
    """A shared folder may show another machine's record a little later than the launcher ended."""
    until = time.monotonic() + ENDING_S
    while len(list(folder.glob("rank[0-9]*.json"))) < size and time.monotonic() < until:
        time.sleep(0.1)
