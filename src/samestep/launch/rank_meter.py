"""Measures from outside what each rank of a monitored command does with its time, and the memory that is its own."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from samestep.launch.hung_rank import Recorded, ask_recorder
from samestep.records.monitor import RankUse
from samestep.world.heartbeat import Pulse

LOOK_S = 5.0  # from one look to the next, at least
SHARE = 0.002  # of one core, that looking may take
FIRST_STEPS = 3  # that are left out: they compile, and start loader workers


class RankMeter:
    """What the ranks that write into `folder` have used since their first steps."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._due = folder, 0.0
        self._first: dict[int, _Look] = {}
        self._uses: dict[int, RankUse] = {}
        self._late_s: dict[int, float] = {}
        self._known_s = 0.0  # of the training, in which it is known which rank came last

    def uses(self) -> list[RankUse]:
        """Returns what is known of each rank, those that have ended too."""
        return [self._uses[rank] for rank in sorted(self._uses)]

    def look_if_due(self, running: Mapping[int, tuple[int, Pulse]]) -> None:
        """Looks at the ranks, if it is time. running: rank -> its pid, and what it last wrote."""
        if time.monotonic() < self._due:
            return
        began = time.thread_time()
        training = {rank: (pid, pulse) for rank, (pid, pulse) in running.items() if pulse.taken >= FIRST_STEPS}
        answers = {rank: ask_recorder(self._folder, rank) for rank in training} if len(training) > 1 else {}
        self._add_lateness([(rank, answer) for rank, answer in answers.items() if answer])
        for rank, (pid, pulse) in training.items():
            look = _Look.now(pid, pulse)
            first = self._first.get(rank)
            if first is None or first.pid != pid:
                first = self._first[rank] = look
            self._uses[rank] = self._use(rank, first, look)
        self._due = time.monotonic() + max(LOOK_S, (time.thread_time() - began) / SHARE)

    def _use(self, rank: int, first: _Look, now: _Look) -> RankUse:
        before, after = first.pulse.clocks, now.pulse.clocks
        loading_cpu_s = (after.loading_cpu_ns - before.loading_cpu_ns) / 1e9
        known = self._uses.get(rank)
        return RankUse(
            rank=rank,
            steps=now.pulse.taken - first.pulse.taken,
            seconds=now.at - first.at,
            loading_s=(after.loading_ns - before.loading_ns) / 1e9,
            compute_s=max(0.0, now.cpu_s - first.cpu_s - loading_cpu_s),
            queue_s=now.queue_s - first.queue_s,
            late_share=self._late_s.get(rank, 0.0) / self._known_s if self._known_s else None,
            fetches=after.fetches - before.fetches,
            fetch_s=(after.fetch_ns - before.fetch_ns) / 1e9,
            fetch_cpu_s=(after.fetch_cpu_ns - before.fetch_cpu_ns) / 1e9,
            workers=after.workers,
            prefetch=after.prefetch,
            first_memory=first.memory,
            memory=now.memory,
            workers_first_memory=known.workers_first_memory if known and known.workers_first_memory else now.children,
            workers_memory=now.children,
        )

    def _add_lateness(self, answers: Sequence[tuple[int, Recorded]]) -> None:
        """Adds the time that the ranks have waited for the one that entered a collective last."""
        if len(answers) < 2:
            return
        common = set.intersection(*({*recorded.entered} for _, recorded in answers))
        entered = [sorted((recorded.entered[key], rank) for rank, recorded in answers) for key in common]
        entered = sorted(entered, key=lambda times: times[-1])
        if len(entered) < 2:
            return
        self._known_s += (entered[-1][-1][0] - entered[0][-1][0]) / 1e9
        until = entered[0][-1][0]  # the collectives of one step wait for the same rank: no second counts twice
        for times in entered[1:]:
            (before, _), (last, rank) = times[-2], times[-1]
            self._late_s[rank] = self._late_s.get(rank, 0.0) + max(0, last - max(before, until)) / 1e9
            until = max(until, last)


@dataclass(frozen=True)
class _Look:
    """A rank at one moment. cpu_s: of the thread that trains; queue_s: that it has waited for a processor. memory,
    children: bytes of the rank's own, and of its children's."""

    pid: int
    at: float
    pulse: Pulse
    cpu_s: float
    queue_s: float
    memory: int
    children: int

    @classmethod
    def now(cls, pid: int, pulse: Pulse) -> _Look:
        children = []
        with suppress(psutil.Error):
            children = [child.pid for child in psutil.Process(pid).children(recursive=True)]
        cpu_s, queue_s = _thread_times(pid, pulse.clocks.thread or pid)
        memory = sum(map(own_bytes, children))
        return cls(pid, time.monotonic(), pulse, cpu_s, queue_s, own_bytes(pid), memory)


def _thread_times(pid: int, thread: int) -> tuple[float, float]:
    """Returns the seconds that a thread has been on a processor, and that it has waited for one."""
    with suppress(OSError, ValueError):
        cpu_ns, queue_ns, _ = Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()
        return int(cpu_ns) / 1e9, int(queue_ns) / 1e9
    return 0.0, 0.0


def own_bytes(pid: int) -> int:
    """Returns the memory of a process in bytes: each page divided by the processes that share it (PSS), without files.

    The resident set counts a page that is shared by copy-on-write in each process, and does not grow when a process
    writes to it and gets a copy of its own.
    """
    with suppress(OSError, ValueError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        sizes = {line.split(":")[0]: line.split()[1] for line in lines[1:]}
        return 1024 * (int(sizes["Pss_Anon"]) + int(sizes["Pss_Shmem"])) if "Pss_Anon" in sizes else 0
    return 0
