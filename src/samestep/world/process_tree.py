"""What this process's descendants use: CPU seconds and disk bytes, of those that have ended too, and memory.

A process's own counters hold those of its children once it has waited for them, and rusage holds those of the children
for which this process has waited. The sum over the living descendants and rusage therefore loses nothing, however short
a child lives between two samples. One kind of child escapes: a parent that ignores SIGCHLD never waits, and the kernel
drops the counters. Such a child counts with what it had used when it was last sampled.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass

import psutil

from samestep.world.orphans import LIBC

PR_SET_CHILD_SUBREAPER = 36  # from linux/prctl.h
BLOCK = 512  # bytes of rusage's blocks


@dataclass(frozen=True)
class TreeUse:
    """What a process tree uses, and has used since it was first looked at.

    processes: that live. cpu_s: user and system seconds on processors. memory: the sum of the resident sets in bytes; a
    page that several processes share counts for each. read, written: bytes from and to disks, not those that the page
    cache answers. readable: False where a process of another user keeps its disk counters to itself.
    """

    processes: int
    cpu_s: float
    memory: int
    read: int
    written: int
    readable: bool = True


@dataclass(frozen=True)
class _Counted:
    """The counters of one living process. children_s: CPU seconds of the children that it has waited for."""

    parent: int
    own_s: float
    children_s: float
    memory: int
    read: int
    written: int
    readable: bool

    @property
    def cpu_s(self) -> float:
        return self.own_s + self.children_s


class ProcessTree:
    """The descendants of this process, but for those with a pid in `without`."""

    def __init__(self, without: Collection[int] = ()) -> None:
        self._without = set(without)
        self._last: dict[tuple[int, float], _Counted] = {}  # (pid, when it was created) -> its latest counters
        self._dropped_s = 0.0  # CPU seconds of children for which nobody waited
        self._waited_s = _rusage().cpu_s
        self._start = self._total()

    def use(self) -> TreeUse:
        """Reads the counters of the whole tree."""
        now, start = self._total(), self._start
        return TreeUse(
            now.processes,
            max(0.0, now.cpu_s - start.cpu_s),
            now.memory,
            max(0, now.read - start.read),
            max(0, now.written - start.written),
            now.readable,
        )

    def pids(self) -> set[int]:
        """Returns the pids of the processes that lived at the latest `use`."""
        return {pid for pid, _ in self._last}

    def _total(self) -> TreeUse:
        living = {}
        for process in psutil.Process().children(recursive=True):
            if process.pid not in self._without and (counted := _counters(process)):
                living[process.pid, process.create_time()] = counted
        ended = _rusage()
        self._dropped_s += self._dropped(living, ended.cpu_s)
        self._last, self._waited_s = living, ended.cpu_s
        counts = living.values()
        return TreeUse(
            len(living),
            self._dropped_s + ended.cpu_s + sum(each.cpu_s for each in counts),
            sum(each.memory for each in counts),
            ended.read + sum(each.read for each in counts),
            ended.written + sum(each.written for each in counts),
            all(each.readable for each in counts),
        )

    def _dropped(self, living: dict[tuple[int, float], _Counted], waited_s: float) -> float:
        """Returns the CPU seconds of the children that have ended since the last look, and that no parent has taken
        over. Only of parents that live: the counters of one that has ended are with its own parent."""
        ended: dict[int, float] = {}  # parent -> what its children had used that are gone
        for key, counted in self._last.items():
            if key not in living:
                ended[counted.parent] = ended.get(counted.parent, 0.0) + counted.cpu_s
        dropped = 0.0
        taken = {pid: counted.children_s for (pid, _), counted in living.items()}
        before = {pid: counted.children_s for (pid, _), counted in self._last.items()}
        taken[os.getpid()], before[os.getpid()] = waited_s, self._waited_s
        for parent, seconds in ended.items():
            if parent in taken and parent in before:
                dropped += max(0.0, seconds - (taken[parent] - before[parent]) - 2 / _TICKS)
        return dropped


_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100  # of the kernel's counters, in a second


def _counters(process: psutil.Process) -> _Counted | None:
    """Returns the counters of one process; None where it has ended."""
    try:
        with process.oneshot():
            times, parent = process.cpu_times(), process.ppid()
            memory = 0 if process.status() == psutil.STATUS_ZOMBIE else process.memory_info().rss
    except psutil.Error:
        return None
    read, written, readable = 0, 0, False
    with suppress(psutil.Error, AttributeError):  # of another user, or a system that does not count
        counted = process.io_counters()
        read, written, readable = counted.read_bytes, counted.write_bytes, True
    children_s = getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
    return _Counted(parent, times.user + times.system, children_s, memory, read, written, readable)


def _rusage() -> TreeUse:
    """Returns the counters of the children for which this process has waited, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return TreeUse(0, used.ru_utime + used.ru_stime, 0, used.ru_inblock * BLOCK, used.ru_oublock * BLOCK)


def adopt_orphans() -> None:
    """Makes descendants whose parent ends children of this process (Linux), so that it can count and end them."""
    if LIBC is not None:
        LIBC.prctl(PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1), 0, 0, 0)


def reap_orphans(but: int) -> None:
    """Waits for the children that have ended, so that their counters move into rusage, until it meets the child `but`,
    for which the caller waits."""
    if sys.platform != "linux":
        return
    with suppress(ChildProcessError):  # there are none
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid != but:
            os.waitpid(ended.si_pid, 0)
