"""What this machine has and uses: its processors, memory and network, this process's descendants and control group.

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
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from samestep.world.processes import LIBC


@dataclass(frozen=True)
class MachineUse:
    """Counters of the whole machine, of all its processes.

    cpu_s: seconds on all processors since the machine started, idle ones and those that wait for a disk left out.
    memory: bytes in use that the kernel could not give to another process. received, sent: bytes on all interfaces of
    this network namespace but the loopback one; local: on that.
    """

    cpu_s: float
    memory: int
    received: int
    sent: int
    local: int


def machine_use() -> MachineUse:
    """Reads the counters."""
    times = psutil.cpu_times()
    busy = times.user + times.system + sum(getattr(times, name, 0.0) for name in ("nice", "irq", "softirq"))
    memory = psutil.virtual_memory()
    received = sent = local = 0
    for name, counted in psutil.net_io_counters(pernic=True).items():
        if name.rstrip("0123456789") == "lo":
            local += counted.bytes_sent
        else:
            received, sent = received + counted.bytes_recv, sent + counted.bytes_sent
    return MachineUse(busy, memory.total - memory.available, received, sent, local)


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
        self._start = self._read()

    def use(self) -> TreeUse:
        """Reads the counters of the whole tree."""
        now, start = self._read(), self._start
        return replace(
            now,
            cpu_s=max(0.0, now.cpu_s - start.cpu_s),
            read=max(0, now.read - start.read),
            written=max(0, now.written - start.written),
        )

    def pids(self) -> set[int]:
        """Returns the pids of the processes that lived at the latest `use`."""
        return {pid for pid, _ in self._last}

    def _read(self) -> TreeUse:
        living = {}
        for process in psutil.Process().children(recursive=True):
            if process.pid not in self._without and (counted := _counters(process)):
                living[process.pid, process.create_time()] = counted
        ended = _rusage()
        self._dropped_s += self._dropped(living, ended.cpu_s)
        self._last, self._waited_s = living, ended.cpu_s
        counts = living.values()
        return TreeUse(
            processes=len(living),
            cpu_s=self._dropped_s + ended.cpu_s + sum(process.cpu_s for process in counts),
            memory=sum(process.memory for process in counts),
            read=ended.read + sum(process.read for process in counts),
            written=ended.written + sum(process.written for process in counts),
            readable=all(process.readable for process in counts),
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
    disk = None
    with suppress(psutil.Error, AttributeError):  # of another user, or a system that does not count
        disk = process.io_counters()
    return _Counted(
        parent=parent,
        own_s=times.user + times.system,
        children_s=getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0),
        memory=memory,
        read=disk.read_bytes if disk else 0,
        written=disk.write_bytes if disk else 0,
        readable=disk is not None,
    )


def _rusage() -> TreeUse:
    """Returns the counters of the children for which this process has waited, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return TreeUse(
        processes=0,
        cpu_s=used.ru_utime + used.ru_stime,
        memory=0,
        read=used.ru_inblock * BLOCK,
        written=used.ru_oublock * BLOCK,
    )


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


CGROUP_ROOT = Path("/sys/fs/cgroup")
NO_LIMIT = 1 << 60  # cgroup v1 writes 'no limit' as a number near 2^63


def memory_limit(*, around: bool = True) -> int | None:
    """Returns the lowest memory limit, in bytes; None where there is none. around: also of the groups around it."""
    limits = [
        _read_number(path) for path in cgroup_files("memory", "memory.max", "memory.limit_in_bytes", around=around)
    ]
    return min((limit for limit in limits if limit is not None and limit < NO_LIMIT), default=None)


def memory_left() -> int | None:
    """Returns how many bytes are left below the lowest memory limit; None where there is none."""
    left = []
    for limit_file, used_file in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        for path in cgroup_files("memory", limit_file, limit_file):
            limit, used = _read_number(path), _read_number(path.with_name(used_file))
            if limit is not None and used is not None and limit < NO_LIMIT:
                left.append(limit - used + _file_cache_bytes(path.with_name("memory.stat")))
    return min(left, default=None)


def usable_cores() -> int:
    """Returns how many cores this process may use by its affinity."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_limit() -> float | None:
    """Returns the lowest limit of CPU time, in cores; None where there is none."""
    limits = []
    for path in cgroup_files("cpu", "cpu.max", "cpu.cfs_quota_us"):
        with suppress(OSError, ValueError):
            if path.name == "cpu.max":
                quota, period = path.read_text().split()
            else:
                quota, period = path.read_text().strip(), path.with_name("cpu.cfs_period_us").read_text().strip()
            if quota not in ("max", "-1"):
                limits.append(int(quota) / int(period))
    return min(limits, default=None)


def cgroup_files(controller: str, v2_name: str, v1_name: str, *, around: bool = True) -> list[Path]:
    """Returns the file of the process's group and, with `around`, of each group around it, where there is one.

    v2_name: its name in cgroup v2; v1_name: in cgroup v1.
    """
    paths: list[Path] = []
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, kind, group = line.split(":", 2)
            if kind and controller not in kind.split(","):
                continue
            root = CGROUP_ROOT / controller if kind else CGROUP_ROOT
            inner = root / group.lstrip("/")
            groups = [inner]
            if around:
                groups += [folder for folder in inner.parents if folder == root or root in folder.parents]
            paths += [folder / (v1_name if kind else v2_name) for folder in groups]
    return [path for path in paths if path.exists()]


def _read_number(path: Path) -> int | None:
    with suppress(OSError, ValueError):
        return int(path.read_text())
    return None


def _file_cache_bytes(path: Path) -> int:
    """Returns the bytes of files that the kernel would give back."""
    with suppress(OSError, ValueError):
        values = dict(line.split() for line in path.read_text().splitlines())
        return int(values.get("total_inactive_file") or values.get("inactive_file") or 0)
    return 0
