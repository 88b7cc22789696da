"""A hung rank of this machine: what it is doing, its stacks, its collectives, and its processes' states."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from samestep.launch import flight_recorder, stacks
from samestep.launch.end import is_local_pid_file
from samestep.launch.flight_recorder import Recorded
from samestep.launch.stacks import STATES, Frame, Stack, users_frame
from samestep.world import heartbeat
from samestep.world.heartbeat import Pulse

WAITS_IN = ("/torch/distributed/", "/horovod/", "/deepspeed/comm/")  # where a rank waits for others


@dataclass(frozen=True)
class HungProcess:
    """A rank's process, or a loader worker of it. state: as /proc names it. row: that it is reading; -1: none."""

    pid: int
    state: str
    text: str = ""  # what it wrote of its stacks
    row: int = heartbeat.NONE
    threads: tuple[Stack, ...] = ()  # the main thread's first

    @property
    def is_stopped(self) -> bool:
        return self.state in ("T", "t")

    def frame(self) -> Frame | None:
        """Returns the line of the user's code that it is at, in the main thread or, while that waits, in another."""
        return next(filter(None, map(users_frame, self.threads)), None)


@dataclass(frozen=True)
class HungRank:
    """What is known of a rank. silent_s: since it last did something. recorded: None: its recorder does not answer."""

    rank: int
    process: HungProcess
    pulse: Pulse
    silent_s: float
    workers: tuple[HungProcess, ...] = ()
    recorded: Recorded | None = None
    host: str = field(default_factory=socket.gethostname)

    def at_work(self) -> HungProcess:
        """Returns the process in which the rank hangs: a loader worker, where the rank waits for one."""
        if self.process.is_stopped:
            return self.process
        stopped = [worker for worker in self.workers if worker.is_stopped]
        busy = [worker for worker in self.workers if worker.frame()]
        main = users_frame(self.process.threads[0]) if self.process.threads else None
        if main is None and self.pulse.activity in (heartbeat.LOADING, heartbeat.EVALUATION):
            return next(iter(stopped + busy), self.process)
        return self.process

    @property
    def place(self) -> str:
        """Where it is: 'my_job.py:88, load_image, row 400 of step 17 (asleep)'."""
        process = self.at_work()
        worker = f"in its loader worker (process {process.pid}), " if process is not self.process else ""
        frame = process.frame() or self._library_frame()
        phase, step = self.pulse.activity, self.pulse.step
        of_step = f" of step {step}" if step >= 0 and phase not in (heartbeat.EVALUATION, heartbeat.CHECKPOINT) else ""
        doing = heartbeat.NAMES[phase]
        if process.row >= 0:
            doing = f"{'row' if phase != heartbeat.EVALUATION else 'evaluation, row'} {process.row}"
        state = STATES.get(process.state, "in an unknown state")
        return f"{worker}at {frame}, {doing}{of_step} ({state})" if frame else f"{worker}in {doing}{of_step} ({state})"

    def _library_frame(self) -> Frame | None:
        """Returns the innermost line of an engine or, failing that, of any library."""
        stack = self.process.threads[0] if self.process.threads else ()
        engines = (frame for frame in stack if "/samestep/engines/" in frame.file)
        return next(engines, stack[0] if stack else None)

    @property
    def waits_in_library(self) -> bool:
        """Whether, by its stack, it waits for other ranks in a library. For collectives that are not torch's."""
        stack = self.process.threads[0] if self.process.threads else ()
        for frame in stack:
            if frame.is_users:
                return False
            if any(part in frame.file for part in WAITS_IN):
                return True
        return False

    def report(self) -> str:
        """Returns all that is known of it, for the file."""
        lines = [f"rank {self.rank} on {self.host}, silent for {self.silent_s:.0f} s: {self.place}"]
        if self.recorded is None:
            lines.append("its collectives are not known: torch's flight recorder does not answer")
        elif not self.recorded.waiting:
            lines.append(f"it waits in no collective; the last that it entered, by group: {self.recorded.last}")
        else:
            lines += [f"it waits in {each}, with inputs of sizes {each.sizes}" for each in self.recorded.waiting]
        for process in (self.process, *self.workers):
            name = "the rank" if process is self.process else "a loader worker"
            lines.append(f"{name}, process {process.pid}, {STATES.get(process.state, 'in an unknown state')}:")
            lines.append(process.text.rstrip() or "  no stack: it does not answer")
        return "\n".join(lines) + "\n"


def pids(folder: Path) -> dict[int, int]:
    """Returns rank -> pid of the ranks of `folder` that were started on this machine."""
    files = [path for path in folder.glob("pid-rank*") if is_local_pid_file(path)]
    return {int(path.name.removeprefix("pid-rank")): int(path.read_text().partition("@")[0]) for path in files}


def collect(folder: Path, pulses: dict[int, Pulse], silent_s: dict[int, float]) -> list[HungRank]:
    """Gets the ranks' collectives, then their stacks: the signal for a stack may wake a process that sleeps.

    pulses, silent_s: of each rank. A rank that has ended meanwhile is left out.
    """
    pid_of = {rank: pid for rank, pid in pids(folder).items() if rank in pulses and stacks.is_alive(pid)}
    children = {rank: _children(pid) for rank, pid in pid_of.items()}
    states = {pid: stacks.state_of(pid) for rank in pid_of for pid in (pid_of[rank], *children[rank])}
    # Of a rank that is stopped nobody answers; its stack comes last, because asking for it lets the rank go on.
    order = sorted(pid_of, key=lambda rank: states[pid_of[rank]] in ("T", "t"))
    recorded = {
        rank: None if states[pid_of[rank]] in ("T", "t") else flight_recorder.ask(folder, rank) for rank in order
    }
    hung = []
    for rank in order:
        rows = pulses[rank].row_of
        processes = []
        for pid in (pid_of[rank], *children[rank]):
            text = stacks.ask([pid], folder / f"stack-rank{rank}.txt")
            row = rows.get(pid, heartbeat.NONE)
            processes.append(HungProcess(pid, states[pid], text, row, stacks.parse(text)))
        hung.append(HungRank(rank, processes[0], pulses[rank], silent_s[rank], tuple(processes[1:]), recorded[rank]))
    return sorted(hung, key=lambda each: each.rank)


def _children(pid: int) -> list[int]:
    """Returns the pids of a rank's loader workers, and of its other children."""
    try:
        return [child.pid for child in psutil.Process(pid).children()]
    except psutil.Error:
        return []


def named(ranks: Sequence[int]) -> str:
    """Returns 'rank 0', 'ranks 0-2' or 'ranks 0, 3'."""
    if len(ranks) > 1 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
