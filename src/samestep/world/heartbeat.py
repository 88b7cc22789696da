"""The heartbeat: each rank writes what it is doing into a small file that it has mapped; the parent reads the file.

A write costs tens of nanoseconds and no system call, so it is part of every step. The file holds 64 slots of sixteen
64-bit numbers. Slot 0 is the rank's; the others are its loader workers', who inherit the mapping.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path

from samestep.world.regular_files import open_kept, remove_file

# The numbers of a slot. From WORLD on they are written by the ranks of a script alone: see Clocks.
BEATS, ACTIVITY, STEP, ROW, PID, TAKEN, WORLD, THREAD, WORKERS, PREFETCH = range(10)
LOADING_NS, LOADING_CPU_NS, FETCH_NS, FETCH_CPU_NS, FETCHES, FIRST_NS = range(10, 16)
CELLS, SLOTS = 16, 64
SIZE = 8 * CELLS * SLOTS
NONE = -1  # no step, no row

# The activities, plain integers because they are written at every step; in the order in which a step goes through them.
# TRAINING: of a script, whose forward and backward are not told apart.
STARTING, BUILDING, LOADING, FORWARD, BACKWARD, EVALUATION, CHECKPOINT, ENDING, TRAINING = range(9)


class Heartbeat:
    """What this process is doing. Until `open` the numbers go to memory that nobody reads."""

    def __init__(self) -> None:
        self._all = memoryview(bytearray(SIZE)).cast("q")
        self._cells = self._all[:CELLS]

    def begin(self, activity: int, step: int = NONE) -> None:
        """Notes that an activity begins. step: how many steps have been done before, as errors number the step."""
        cells = self._cells
        cells[ACTIVITY] = activity
        cells[STEP] = step
        cells[ROW] = NONE
        cells[BEATS] += 1

    def build(self) -> None:
        """Notes that a training begins, with its model."""
        self._cells[TAKEN] = 0
        self.begin(BUILDING)

    def step(self, done: int, activity: int = BACKWARD) -> None:
        """Notes the end of a step. activity: until the next batch; it counts as the backward's."""
        self._cells[TAKEN] += 1
        self.begin(activity, done)

    def row(self, index: int) -> None:
        """Notes that a row of the dataset is being read; NONE: it has been read."""
        cells = self._cells
        cells[ROW] = index
        cells[BEATS] += 1

    def describe(self, world: int, thread: int) -> None:
        """Notes how many ranks there are, and the thread that trains, by the kernel's number."""
        self._cells[WORLD] = world
        self._cells[THREAD] = thread

    def loaded(self, ns: int, cpu_ns: int, workers: int, prefetch: int, *, first: bool = False) -> None:
        """Notes that the thread that trains has waited for a batch. cpu_ns: of these, on a processor. first: of an
        iterator, whose workers have just been started."""
        cells = self._cells
        cells[LOADING_NS] += ns
        if first:
            cells[FIRST_NS] += ns
        cells[LOADING_CPU_NS] += cpu_ns
        cells[WORKERS] = workers
        cells[PREFETCH] = prefetch

    def fetched(self, ns: int, cpu_ns: int) -> None:
        """Notes that this process has loaded a batch. cpu_ns: of these, on a processor."""
        cells = self._cells
        cells[FETCH_NS] += ns
        cells[FETCH_CPU_NS] += cpu_ns
        cells[FETCHES] += 1
        cells[BEATS] += 1

    def leave(self) -> None:
        """Writes to memory that nobody reads from now on. Call it in a forked process; is_worker may follow."""
        self._cells = memoryview(bytearray(8 * CELLS)).cast("q")

    def open(self, path: Path) -> None:
        """Writes into the file `path` from now on. A full disk leaves this process without a heartbeat."""
        try:
            # A new file: to make one shorter that another process has mapped would end that process.
            remove_file(path)
            with open_kept(path) as file:
                file.write(bytes(SIZE))  # takes the blocks: a full disk would kill a process that writes to a hole
                self._all = memoryview(mmap.mmap(file.fileno(), SIZE)).cast("q")
        except (OSError, ValueError):
            return
        self._use(0)

    def is_worker(self, number: int) -> None:
        """Writes into the slot of loader worker `number` from now on. Call it in the worker."""
        self._use(1 + number % (SLOTS - 1))

    def _use(self, slot: int) -> None:
        self._cells = self._all[slot * CELLS : (slot + 1) * CELLS]
        for cell in (BEATS, ACTIVITY, STEP, TAKEN):
            self._cells[cell] = 0
        self._cells[ROW] = NONE
        self._cells[PID] = os.getpid()


heartbeat = Heartbeat()  # this process's


@dataclass(frozen=True)
class Clocks:
    """What a rank of a script has taken so far, where it is monitored. Every value is 0 where it is not."""

    world: int = 0
    """The number of ranks."""

    thread: int = 0
    """The thread that trains, by the kernel's number."""

    workers: int = 0
    """The number of workers of the loader that the rank reads."""

    prefetch: int = 0
    """How many batches each of these workers loads ahead."""

    loading_ns: int = 0
    """Nanoseconds that the rank has waited for batches."""

    loading_cpu_ns: int = 0
    """The part of `loading_ns` on a processor."""

    fetch_ns: int = 0
    """Nanoseconds that the rank or its loader workers took to load batches."""

    fetch_cpu_ns: int = 0
    """The part of `fetch_ns` on a processor."""

    fetches: int = 0
    """How many batches the rank or its loader workers have loaded."""

    first_ns: int = 0
    """The part of `loading_ns` for the first batch of an iterator."""


@dataclass(frozen=True)
class Pulse:
    """What a rank last wrote."""

    beats: int
    """The beats of the rank and its loader workers. The number changes while any of them is at work."""

    activity: int
    """What the rank is doing: one of the activities from STARTING to TRAINING."""

    step: int
    """How many steps had been done when the activity began. NONE: the activity belongs to no step."""

    taken: int
    """How many steps of this training this process has taken."""

    row_of: dict[int, int]
    """pid -> the row that the rank or a loader worker is reading."""

    clocks: Clocks = Clocks()
    """What the rank has taken so far, where it is monitored."""

    worker_pids: tuple[int, ...] = ()
    """The pids of the processes that have loaded a batch for the rank so far."""


def file_of(folder: Path, rank: int) -> Path:
    """Returns the file of a rank's heartbeat."""
    return folder / f"heartbeat-rank{rank}"


def read(path: Path) -> Pulse | None:
    """Reads a rank's heartbeat; None where there is none."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    if len(content) != SIZE:
        return None
    cells = memoryview(content).cast("q").tolist()
    slots = [cells[first : first + CELLS] for first in range(0, len(cells), CELLS)]
    rows = {slot[PID]: slot[ROW] for slot in slots if slot[PID] and slot[ROW] != NONE}
    sums = (sum(slot[cell] for slot in slots) for cell in (FETCH_NS, FETCH_CPU_NS, FETCHES))
    clocks = Clocks(*slots[0][WORLD:FETCH_NS], *sums, *slots[0][FIRST_NS:])
    beats = sum(slot[BEATS] for slot in slots)
    workers = tuple(slot[PID] for slot in slots[1:] if slot[PID])
    return Pulse(
        beats,
        slots[0][ACTIVITY],
        slots[0][STEP],
        taken=slots[0][TAKEN],
        row_of=rows,
        clocks=clocks,
        worker_pids=workers,
    )
