"""Runs a launch: one process tree that ends with this process, its output in files."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

import psutil

from samestep.errors import say
from samestep.launch import Command, Machines, first_error, fork_client
from samestep.launch.end import ENDING_S, Deadline, IdleLauncher, Tree, end_tree, signal_ranks
from samestep.launch.monitor_sampler import MonitorSampler
from samestep.launch.rank_logs import LogRotation
from samestep.launch.watchdog import Watchdog
from samestep.message import message
from samestep.records.record import Progress, Record, read_progress
from samestep.world.processes import COMMAND, die_with_parent, this_command
from samestep.world.regular_files import open_end, paths_in, remove_file

_going_on: set[Path] = set()  # the folders of the launches that go on: ranks may train while the reference is played
_changing = threading.Lock()  # held while a launch is added or ended


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
    as_threads: bool = False,
) -> Record:
    """Starts `command`, waits until it has ended, and returns the record of the `size` ranks that write into `folder`.

    watch: called with the progress about ten times a second. deadline_s: seconds after which each rank's stack goes to
    stack-rankR.txt in `folder` and the tree is killed. graceful: the first interrupt stops the ranks after a step, the
    second ends them. ends_by: signals that end them at once. stall_s: as --stall, after which a hang is named.
    samples_usage: writes usage.csv and usage.json into `folder`. as_threads: whether the ranks are threads of one
    process. Raises UserError or TrainingFailed with the error of the first rank that failed. The process tree has
    always ended when this function returns or raises.
    """
    for lock in clear_stale_locks(os.environ):
        say(message("stale_lock_removed", lock=lock))
    killed_before = first_error.memory_kills()
    deadline, idle = Deadline(deadline_s, folder), IdleLauncher(folder, machines)
    watchdog = Watchdog(folder, size, machines, stall_s, as_threads=as_threads)
    progress, logs, builds = Progress(), LogRotation(folder), ExtensionBuilds(os.environ)
    sampled = closing(MonitorSampler(folder)) if samples_usage else nullcontext()
    with closing(StopRequests(folder, accepted=graceful, ends_by=ends_by)) as requests, sampled as sampler:
        with _changing:
            _going_on.add(folder)
        tree = None
        try:
            tree = start(command, folder, machines, deadline_s)
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
                builds.tell_new()
                time.sleep(0.1 if watch else 0.02)
        finally:
            with _changing:
                _going_on.discard(folder)
                if tree:
                    end_tree(tree, folder, is_last=not _going_on)
    code = tree.returncode if tree.returncode is not None else -signal.SIGKILL
    if code == 0 and machines.nnodes > 1 and not paths_in(folder, "error-rank*"):
        _await_records(folder, size)
    record = Record(folder)
    killed = first_error.memory_kills() - killed_before
    first_error.raise_if_failed(
        record, code, size, machines=machines, killed_for_memory=killed, launchers=command.launchers
    )
    return record


def start(command: Command, folder: Path, machines: Machines, deadline_s: float | None = None) -> Tree:
    """Starts a launch's command, and appends its output to log.txt in `folder`."""
    # torch warns about addresses without host names; its profiler says when it starts
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR", "KINETO_LOG_LEVEL": "6"}
    environment = quiet | os.environ | {"PYTHONUNBUFFERED": "1", COMMAND: this_command()} | dict(command.env)
    host = f"-{socket.gethostname()}" if machines.nnodes > 1 else ""  # the folder may be shared
    log = folder / f"log{host}.txt"
    if command.fork:
        arguments = command.argv[command.argv.index("samestep.worker") + 1 :]
        if worker := fork_client.fork(command.fork, arguments, environment, log, deadline_s, command.preloads):
            return worker
    with open_end(log) as output:
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
    while len(paths_in(folder, "rank[0-9]*.json")) < size and time.monotonic() < until:
        time.sleep(0.1)


SCHEDULERS = ("SIGUSR1", "SIGUSR2", "SIGXCPU")  # before the training they wait until it has begun
REPEATED = (*SCHEDULERS, "SIGHUP")  # a second one asks for nothing more: both shell and kernel tell of a lost terminal
REQUESTS = ("SIGINT", "SIGTERM", *REPEATED)


class StopRequests:
    """Forwards a request to the ranks of `folder`, once they train.

    accepted: False: an interrupt ends the launch. ends_by: the signals that end it too. An outer launcher sends SIGTERM
    to its ranks when one of them has failed, and none of them can train on.
    """

    def __init__(self, folder: Path, *, accepted: bool, ends_by: Collection[signal.Signals] = ()) -> None:
        self._folder = folder
        self._signals: list[int] = []
        self._stopping = False
        self._notified_attempt: int | None = None
        self._before: dict[int, Any] = {}
        # Python allows signal handlers in the main thread only; without one, a signal does what it did before.
        if not accepted or current_thread() is not main_thread():
            return
        for number in (getattr(signal, name) for name in REQUESTS if hasattr(signal, name)):
            ignored = signal.getsignal(number) in (signal.SIG_IGN, None) and number.name not in SCHEDULERS
            if number not in ends_by and not ignored:  # as under nohup, and Ctrl-C in a shell's background
                self._before[number] = signal.signal(number, self._on_signal)

    def close(self) -> None:
        """Puts the signal handlers back that were there before."""
        for number, before in self._before.items():
            signal.signal(number, before)

    def _on_signal(self, number: int, frame: Any) -> None:
        """Takes a signal during the training as a request; Ctrl-C or SIGTERM once more ends the launch.

        Once more: after the sentence that says so, because `timeout` sends its signal twice at once. In the handler: a
        KeyboardInterrupt can be raised anywhere, also where no one is ready to catch it.
        """
        name = signal.Signals(number).name
        ending = [received for received in self._signals if signal.Signals(received).name not in REPEATED]
        once_more = name not in REPEATED and ending and (self._stopping or len(ending) > 1)
        if once_more or (name not in SCHEDULERS and read_progress(self._folder).done is None):
            self._end(number, frame)
        self._signals.append(number)

    def _end(self, number: int, frame: Any) -> None:
        """Does what the signal did before."""
        before = self._before[number]
        if callable(before):
            before(number, frame)
        elif before == signal.SIG_DFL:
            signal.signal(number, before)
            os.kill(os.getpid(), number)

    def forward(self, progress: Progress) -> None:
        """Signals the ranks once, and again after their launcher has restarted them."""
        if progress.done is None:
            return
        if self._signals and not self._stopping:
            number = signal.Signals(self._signals[0])
            interrupted = number == signal.SIGINT
            say(message("stops_after_a_step" if interrupted else "stops_after_a_step_by_signal", signal=number.name))
            self._stopping = True
        if self._stopping and progress.attempt != self._notified_attempt:
            self._notified_attempt = progress.attempt
            signal_ranks(self._folder, signal.SIGUSR2)


YOUNG_S = 120.0  # on a shared disk, a process of another machine may hold a lock that is younger
SHARED = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "fuse", "9p", "smb", "cifs", "afs")


def clear_stale_locks(env: Mapping[str, str]) -> list[Path]:
    """Removes locks that no process of this machine holds; on a shared disk only old ones. Returns their paths."""
    removed = []
    for lock in _locks(env):
        try:
            young = time.time() - lock.stat().st_mtime < YOUNG_S
            if not (young and _is_shared(lock)) and not _is_held(lock):
                remove_file(lock)
                removed.append(lock)
        except OSError:
            continue  # the build has ended meanwhile, or the lock is another user's
    return removed


def _locks(env: Mapping[str, str]) -> list[Path]:
    """Returns the locks of torch's extensions, each in the folder of the one that is being built or loaded."""
    cache = Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    root = Path(env.get("TORCH_EXTENSIONS_DIR") or cache / "torch_extensions")
    return [*root.glob("*/lock"), *root.glob("*/*/lock")]


class ExtensionBuilds:
    """Says once of each extension of torch that the ranks compile, as DeepSpeed's, why they do not begin."""

    LOOK_EVERY_S = 1.0

    def __init__(self, env: Mapping[str, str]) -> None:
        """Looks at the locks that are there already: another command's, or left behind."""
        self._env = env
        self._known = set(_locks(env))
        self._due = 0.0

    def tell_new(self) -> None:
        """Says which extensions have begun to be compiled. One that is loaded is locked for a moment, too."""
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + self.LOOK_EVERY_S
        for lock in _locks(self._env):
            if lock not in self._known and not list(lock.parent.glob("*.so")):
                self._known.add(lock)
                say(message("extension_is_compiled", extension=lock.parent.name, folder=lock.parent))


def _is_shared(path: Path) -> bool:
    """Whether `path` is on a file system that other machines may write to."""
    mounts = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    mount = next((folder for folder in path.resolve().parents if folder in mounts), None)
    return mount is not None and mounts[mount].startswith(SHARED)


def _is_held(lock: Path) -> bool:
    """Whether a process has the file open, among those that this user may inspect."""
    for process in psutil.process_iter():
        try:
            if any(os.path.realpath(opened.path) == os.path.realpath(lock) for opened in process.open_files()):
                return True
        except psutil.Error:
            continue
    return False
