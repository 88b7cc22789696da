"""A hung rank of this machine: what it is doing, its stacks, its collectives, and its processes' states."""

from __future__ import annotations

import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from samestep.launch import stacks
from samestep.launch.end import is_local_pid_file
from samestep.launch.stacks import Frame, Stack, users_frame
from samestep.message import Message, message
from samestep.records.flight_recorder import DEFAULT_GROUP, entries_of
from samestep.world import heartbeat, questions
from samestep.world.heartbeat import Pulse
from samestep.world.regular_files import paths_in

# By the numbers of world.heartbeat.
ACTIVITIES = (
    "rank_starts",
    "rank_builds_the_model",
    "rank_loads_a_batch",
    "rank_is_in_forward",
    "rank_is_in_backward",
    "rank_evaluates",
    "rank_writes_a_checkpoint",
    "rank_ends",
    "rank_trains",
)
# Where a rank waits for others.
WAITS_IN = ("/torch/distributed/", "/torch/testing/_internal/distributed/", "/horovod/", "/deepspeed/comm/")


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
        return self.state in stacks.STOPPED

    def frame(self) -> Frame | None:
        """Returns the line of the user's code that it is at, in the main thread or, while that waits, in another."""
        return next(filter(None, map(users_frame, map(stacks.inside_worker, self.threads))), None)


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
        # While it builds the job a process that it has forked reads rows, to compare the ranks' datasets.
        reading = (heartbeat.LOADING, heartbeat.EVALUATION, heartbeat.BUILDING)
        reads = self.pulse.activity in reading or self._is_in_loader
        if self._waits_for_worker and reads:
            return next(iter(stopped + busy), self.process)
        return self.process

    @property
    def _waits_for_worker(self) -> bool:
        """Whether its main thread is in no line of the user's; or in one that reads a loader of torch's."""
        for frame in self.process.threads[0] if self.process.threads else ():
            if frame.is_users:
                return False
            if frame.file.endswith(stacks.LOADER_FILE):
                return True
        return True

    @property
    def _is_in_loader(self) -> bool:
        """Whether its main thread is in torch's loader: workers that are kept are also waited for before an epoch."""
        stack = self.process.threads[0] if self.process.threads else ()
        return any(frame.file.endswith(stacks.LOADER_FILE) for frame in stack)

    @property
    def place(self) -> Message:
        """Where it is: 'rank 1 (host h1, process 12) is at my_job.py:88, load_image, reading row 400 of step 17'."""
        process = self.at_work()
        frame = process.frame() or self._library_frame()
        doing, step = self.pulse.activity, self.pulse.step
        activity = Message(ACTIVITIES[doing])
        if process.row >= 0:
            activity = message(
                "reading_row_of_the_evaluation" if doing == heartbeat.EVALUATION else "reading_row", row=process.row
            )
        return message(
            "rank_is_at",
            rank=self.rank,
            host=self.host,
            process=self.process.pid,
            worker=process.pid if process is not self.process else None,
            frame=frame and str(frame),
            activity=activity,
            step=step if step >= 0 and doing not in (heartbeat.EVALUATION, heartbeat.CHECKPOINT) else None,
            state=stacks.state_named(process.state),
        )

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
        """Returns all that is known of it, for the file: where it is, then its collectives and stacks as they are."""
        lines = [str(self.place)]
        if self.recorded is None:
            lines.append("collectives: unknown (torch's flight recorder does not answer)")
        else:
            lines += [f"waiting in: {waited}, inputs {waited.sizes}" for waited in self.recorded.waiting]
            lines.append(f"last collective of each group: {self.recorded.last}")
        for process in (self.process, *self.workers):
            kind = "rank" if process is self.process else "loader worker"
            lines.append(f"{kind}, process {process.pid}, state {process.state or '?'}:")
            lines.append(process.text.rstrip() or "  no stack")
        return "\n".join(lines) + "\n"


def pids(folder: Path) -> dict[int, int]:
    """Returns rank -> pid of the ranks of `folder` that were started on this machine."""
    files = [path for path in paths_in(folder, "pid-rank*") if is_local_pid_file(path)]
    return {int(path.name.removeprefix("pid-rank")): int(path.read_text().partition("@")[0]) for path in files}


def collect(
    folder: Path,
    pulses: dict[int, Pulse],
    silent_s: dict[int, float],
    *,
    number: int = signal.SIGUSR1,
    go_on: bool = False,
) -> list[HungRank]:
    """Gets the ranks' collectives, then their stacks: the signal for a stack may wake a process that sleeps.

    pulses, silent_s: of each rank. number: the signal on which they write their stacks. go_on: whether the ranks are to
    go on afterwards: one that is stopped, or that ends, gets no signal then. A rank that has ended meanwhile is left
    out.
    """
    pid_of = {rank: pid for rank, pid in pids(folder).items() if rank in pulses and stacks.is_alive(pid)}
    children = {rank: _children(pid) for rank, pid in pid_of.items()}
    states = {pid: stacks.state_of(pid) for rank in pid_of for pid in (pid_of[rank], *children[rank])}
    # Of a rank that is stopped nobody answers; its stack comes last, because asking for it lets the rank go on.
    order = sorted(pid_of, key=lambda rank: states[pid_of[rank]] in stacks.STOPPED)
    recorded = {rank: None if states[pid_of[rank]] in stacks.STOPPED else ask_recorder(folder, rank) for rank in order}
    hung = []
    for rank in order:
        rows, ends = pulses[rank].row_of, pulses[rank].activity == heartbeat.ENDING
        processes = []
        for pid in (pid_of[rank], *children[rank]):
            answer = questions.ask(folder, rank, questions.STACKS) if pid == pid_of[rank] and recorded[rank] else None
            text = (answer or b"").decode(errors="replace")
            if not text and not (go_on and (ends or states[pid] in stacks.STOPPED)):
                text = stacks.ask([pid], folder / f"stack-rank{rank}.txt", number)
            row = rows.get(pid, heartbeat.NONE)
            processes.append(HungProcess(pid, states[pid], text, row, stacks.parse(text)))
        hung.append(HungRank(rank, processes[0], pulses[rank], silent_s[rank], tuple(processes[1:]), recorded[rank]))
    return sorted(hung, key=lambda rank: rank.rank)


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


@dataclass(frozen=True)
class Collective:
    """A collective that a rank has entered. group: its process group. created_ns: since 1970. sizes: of its inputs."""

    group: str
    number: int
    operation: str
    sizes: tuple[tuple[int, ...], ...]
    created_ns: int
    retired: bool

    def __str__(self) -> str:
        return f"{self.operation} #{self.number}" + (f" of group {self.group}" if self.group != DEFAULT_GROUP else "")

    @property
    def is_default(self) -> bool:
        """Whether it is of the group that holds all ranks."""
        return self.group == DEFAULT_GROUP

    @property
    def what(self) -> tuple[str, tuple[tuple[int, ...], ...]]:
        """What ranks must have in common in one collective."""
        return self.operation, self.sizes if self.operation in EQUAL_SIZES else ()


EQUAL_SIZES = ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter")


@dataclass(frozen=True)
class Recorded:
    """What a rank's recorder reports. last: group -> the number of the collective that it entered last.
    entered: (group, number) -> when it entered a recent collective, in ns since 1970. sends: whether it has sent to
    single ranks, or received from them, of late."""

    last: dict[str, int]
    waiting: tuple[Collective, ...]
    entered: dict[tuple[str, int], int] = field(default_factory=dict)
    sends: bool = False

    @property
    def first_waiting(self) -> Collective | None:
        return min(self.waiting, key=lambda collective: collective.created_ns, default=None)


def ask_recorder(folder: Path, rank: int) -> Recorded | None:
    """Asks the recorder of a rank of this machine. None where it does not answer: it has none, or is stopped."""
    try:
        return recorded(questions.ask(folder, rank, questions.COLLECTIVES) or b"")
    except ValueError:
        return None


def recorded(text: bytes | str) -> Recorded:
    """Reads a recorder's trace. Raises ValueError where the text is none."""
    entries = entries_of(text)
    entered = [
        Collective(
            entry.group,
            entry.collective_seq_id,
            entry.operation,
            entry.input_sizes,
            entry.time_created_ns,
            entry.retired,
        )
        for entry in entries
        if not entry.is_p2p
    ]
    last: dict[str, int] = {}
    for collective in entered:
        last[collective.group] = max(collective.number, last.get(collective.group, 0))
    waiting = tuple(collective for collective in entered if not collective.retired)
    when = {(collective.group, collective.number): collective.created_ns for collective in entered}
    return Recorded(last, waiting, when, sends=any(entry.is_p2p for entry in entries))
