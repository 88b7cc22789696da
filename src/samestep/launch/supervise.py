"""Runs a launch: one process tree that ends with this process, its output in files."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path

from samestep.errors import say
from samestep.launch import Command, Machines, first_error, fork_client, oom_kills
from samestep.launch.deadline import Deadline
from samestep.launch.end import end_tree
from samestep.launch.fork_client import ForkedWorker
from samestep.launch.idle_launcher import ENDING_S, IdleLauncher
from samestep.launch.log_rotation import LogRotation
from samestep.launch.stale_locks import clear_stale_locks
from samestep.launch.stop_requests import StopRequests
from samestep.launch.usage import UsageSampler
from samestep.launch.watchdog import Watchdog
from samestep.records.record import Progress, Record, read_progress
from samestep.world.processes import COMMAND, die_with_parent, this_command


def run(
    command: Command,
    folder: Path,
    size: int,
    *,
    deadline_s: float | None = None,
    watch: Callable[[Progress], None] | None = None,
    machines: Machines = Machines(),  # noqa: B008 - frozen
    graceful: bool = False,
    stall_s: float | None = None,
    ends_by: Collection[signal.Signals] = (),
    samples_usage: bool = False,
) -> Record:
    """Starts `command`, waits until it has ended, and returns the record of the `size` ranks that write into `folder`.

    watch: called with the progress about ten times a second. deadline_s: seconds after which each rank's stack goes to
    stack-rankR.txt in `folder` and the tree is killed. graceful: the first interrupt stops the ranks after a step, the
    second ends them. ends_by: signals that end them at once. stall_s: as --stall, after which a hang is named.
    samples_usage: writes usage.csv and usage.json into `folder`. Raises UserError or TrainingFailed with the error of
    the first rank that failed. The process tree has always ended when this function returns or raises.
    """
    for lock in clear_stale_locks(os.environ):
        say(f"removed {lock}, the lock of a build that was killed")
    killed_before = oom_kills.kills()
    deadline, idle = Deadline(deadline_s, folder), IdleLauncher(folder, machines)
    watchdog = Watchdog(folder, size, machines, stall_s)
    progress, logs = Progress(), LogRotation(folder)
    sampled = closing(UsageSampler(folder)) if samples_usage else nullcontext()
    with closing(StopRequests(folder, accepted=graceful, ends_by=ends_by)) as requests, sampled as sampler:
        tree = start(command, folder, machines, deadline_s)
        try:
            while tree.poll() is None and not idle.is_stuck():
                progress = read_progress(folder, progress) if watch or graceful else progress
                if watch:
                    watch(progress)
                if sampler:
                    sampler.sample_if_due()
                logs.rotate()  # after the terminal has shown what they hold
                requests.forward(progress)
                if deadline.is_over() and tree.poll() is None:  # printing the output takes time too
                    deadline.fail()
                watchdog.check()
                time.sleep(0.1 if watch else 0.02)
        finally:
            end_tree(tree, folder)
    code = tree.returncode if tree.returncode is not None else -signal.SIGKILL
    if code == 0 and machines.nnodes > 1 and not list(folder.glob("error-rank*")):
        _await_records(folder, size)
    record = Record(folder)
    first_error.raise_if_failed(record, code, size, machines, oom_kills.kills() - killed_before, command.launchers)
    return record


def start(
    command: Command, folder: Path, machines: Machines, deadline_s: float | None = None
) -> subprocess.Popen[bytes] | ForkedWorker:
    """Starts a launch's command, and appends its output to log.txt in `folder`."""
    # torch warns about addresses without host names; its profiler says when it starts
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR", "KINETO_LOG_LEVEL": "6"}
    environment = quiet | os.environ | {"PYTHONUNBUFFERED": "1", COMMAND: this_command()} | dict(command.env)
    host = f"-{socket.gethostname()}" if machines.nnodes > 1 else ""  # the folder may be shared
    log = folder / f"log{host}.txt"
    if command.fork:
        arguments = command.argv[command.argv.index("samestep.worker") + 1 :]
        if worker := fork_client.fork(command.fork, arguments, environment, log, deadline_s):
            return worker
    with open(log, "ab") as output:
        return subprocess.Popen(
            command.argv,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # the terminal sends Ctrl-C to this process only, which ends the tree
            preexec_fn=partial(_prepare_child, command.ends_by) if sys.platform != "win32" else None,
        )


def _prepare_child(ends_by: signal.Signals) -> None:
    """Runs in the new process, before it executes the launcher."""
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # Slurm sends one to every process, and would end the launcher
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(ends_by=ends_by)


def _await_records(folder: Path, size: int) -> None:
    """Waits for other machines' records, which may appear in a shared folder after the launcher has ended."""
    until = time.monotonic() + ENDING_S
    while len(list(folder.glob("rank[0-9]*.json"))) < size and time.monotonic() < until:
        time.sleep(0.1)
