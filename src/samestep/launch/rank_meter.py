"""Measures from outside what each rank of a monitored command does with its time, and the memory that is its own."""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import psutil

from samestep.launch import stacks
from samestep.launch.hung_rank import Recorded, ask_recorder
from samestep.records.monitor import RankUse
from samestep.world import questions
from samestep.world.heartbeat import Pulse

LOOK_S = 5.0  # from one look to the next, at least
SHARE = 0.002  # of one core, that looking may take
GREW = 1.2  # times the memory of the look before: what has grown is looked at again soon, as a peak goes away
FIRST_STEPS = 3  # that are left out: they compile, and start loader workers
MOST_LOOKS = 30  # at a late rank's stack, and at another one's
APART_S = 0.3, 1.0  # from one look at both to the next: drawn, as a step may take as long


class RankMeter:
    """What the ranks that write into `folder` have used since their first steps."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._due, self._stacks_due = folder, 0.0, 0.0
        self._first: dict[int, _Look] = {}
        self._latest: dict[int, deque[_Look]] = {}  # the two latest that had loader workers, if any had
        self._with_workers: dict[int, _Look] = {}  # the first that had, where the first had none
        # Late rank -> the lines at which looks at its stack found it, and looks at one that is not late.
        self._lines: dict[int, tuple[Counter[str], Counter[str]]] = {}
        self._is_soon = False  # whether the next look is
        self._unpaid_s = 0.0  # of looks, which the time to the next one is to make up for
        self._looked: Counter[int] = Counter()  # at a late rank's stack
        self._uses: dict[int, RankUse] = {}
        self._late_s: dict[int, float] = {}
        self._known_s = 0.0  # of the training, in which it is known which rank came last
        self._sends = False  # whether ranks send to single ranks: which of them is waited for is not known

    def uses(self) -> list[RankUse]:
        """Returns what is known of each rank, those that have ended too."""
        return [self._with_line(self._uses[rank]) for rank in sorted(self._uses)]

    def _with_line(self, use: RankUse) -> RankUse:
        own_lines, other_lines = self._lines.get(use.rank, (Counter[str](), Counter[str]()))
        line = max(own_lines, key=lambda line: own_lines[line] - other_lines[line], default="")
        return replace(
            use, line=line, looks=own_lines.total(), looks_at_line=own_lines[line], others_at_line=other_lines[line]
        )

    def look_if_due(self, running: Mapping[int, tuple[int, Pulse]]) -> bool:
        """Looks at the ranks, if it is time; returns whether it did.

        running: rank -> its pid, and what it last wrote.
        """
        if time.monotonic() < self._due:
            return False
        began, is_soon = time.thread_time(), self._is_soon
        training = {rank: (pid, pulse) for rank, (pid, pulse) in running.items() if pulse.taken >= FIRST_STEPS}
        answers = {rank: ask_recorder(self._folder, rank) for rank in training} if len(training) > 1 else {}
        self._add_lateness([(rank, answer) for rank, answer in answers.items() if answer])
        self._sends = self._sends or any(answer.sends for answer in answers.values() if answer)
        self._is_soon = False
        for rank, (pid, pulse) in training.items():
            look = _Look.now(pid, pulse)
            first = self._first.get(rank)
            if first is None or first.pid != pid:
                first, self._is_soon = look, True
                self._first[rank] = look
                self._latest[rank] = deque(maxlen=2)
                self._with_workers.pop(rank, None)
            use = self._uses[rank] = self._use(rank, first, look)
            if not is_soon and look.memory + look.workers > GREW * (use.memory + use.workers_memory):
                self._is_soon = True
        self._unpaid_s += time.thread_time() - began
        # What is told needs two looks: the first one's time is made up for after the second.
        self._due = time.monotonic() + (LOOK_S if self._is_soon else max(LOOK_S, self._unpaid_s / SHARE))
        self._unpaid_s = self._unpaid_s if self._is_soon else 0.0
        return bool(training)

    def look_at_stacks(self, late: int) -> None:
        """Notes, if it is time, at which line of the user's code a late rank is, and at which the least late one is:
        where both wait, as in a collective or where each is slowed down, neither is late by that line."""
        punctual = min((rank for rank in self._uses if rank != late), key=lambda rank: self._late_s.get(rank, 0.0))
        if self._looked[late] >= MOST_LOOKS or time.monotonic() < self._stacks_due:
            return
        self._stacks_due = time.monotonic() + random.uniform(*APART_S)
        self._looked[late] += 1
        threads = [self._main_thread(rank) for rank in (late, punctual)]
        if all(threads):  # not of one that has ended
            for lines, frames in zip(self._lines.setdefault(late, (Counter(), Counter())), threads):
                lines.update(map(str, filter(None, map(stacks.users_frame, frames))))

    def _main_thread(self, rank: int) -> tuple[stacks.Stack, ...]:
        """Returns the stack of a rank's main thread; () where it does not answer."""
        answer = questions.ask(self._folder, rank, questions.STACKS)
        return stacks.parse((answer or b"").decode(errors="replace"))[:1]

    def _use(self, rank: int, first: _Look, now: _Look) -> RankUse:
        before, after = first.pulse.clocks, now.pulse.clocks
        loading_cpu_s = (after.loading_cpu_ns - before.loading_cpu_ns) / 1e9
        first_memory, memory = self._memories(rank, now)
        return RankUse(
            rank=rank,
            steps=now.pulse.taken - first.pulse.taken,
            seconds=now.at - first.at,
            loading_s=(after.loading_ns - before.loading_ns) / 1e9,
            first_loading_s=(after.first_ns - before.first_ns) / 1e9,
            compute_s=max(0.0, now.cpu_s - first.cpu_s - loading_cpu_s),
            queue_s=now.queue_s - first.queue_s,
            late_share=self._late_s.get(rank, 0.0) / self._known_s if self._known_s else None,
            fetches=after.fetches - before.fetches,
            fetch_s=(after.fetch_ns - before.fetch_ns) / 1e9,
            fetch_cpu_s=(after.fetch_cpu_ns - before.fetch_cpu_ns) / 1e9,
            workers=after.workers,
            prefetch=after.prefetch,
            first_memory=first_memory.memory,
            memory=memory.memory,
            workers_first_memory=first_memory.workers,
            workers_memory=memory.workers,
            worker_first_resident=first_memory.worker_resident,
            worker_resident=memory.worker_resident,
            worker_processes=memory.worker_processes,
            sends=self._sends,
        )

    def _memories(self, rank: int, now: _Look) -> tuple[_Look, _Look]:
        """Returns the looks at the memory to be compared: the first, and the lesser of the two latest.

        A moment's peak, as while a checkpoint is written, is no growth. Without its loader workers, between two epochs,
        a rank has to itself the pages that it shared with them: such a look is left out.
        """
        latest = self._latest[rank]
        if latest and now.workers and not latest[-1].workers:
            self._with_workers[rank] = now
            latest.clear()
        if not latest or now.workers or not latest[-1].workers:
            latest.append(now)
        return self._with_workers.get(rank, self._first[rank]), min(latest, key=lambda look: look.memory + look.workers)

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
    workers: bytes of the rank's own, and of its loader workers', of which there are worker_processes; worker_resident:
    the mean of their resident sets."""

    pid: int
    at: float
    pulse: Pulse
    cpu_s: float
    queue_s: float
    memory: int
    workers: int
    worker_processes: int = 0
    worker_resident: float = 0.0

    @classmethod
    def now(cls, pid: int, pulse: Pulse) -> _Look:
        cpu_s, queue_s = _thread_times(pid, pulse.clocks.thread or pid)
        workers = [memory_of(worker) for worker in pulse.worker_pids if _is_child(worker, pid)]
        workers_memory = sum(worker.own for worker in workers)
        resident = statistics.fmean(worker.resident for worker in workers) if workers else 0.0
        return cls(
            pid,
            time.monotonic(),
            pulse,
            cpu_s=cpu_s,
            queue_s=queue_s,
            memory=memory_of(pid).own,
            workers=workers_memory,
            worker_processes=len(workers),
            worker_resident=resident,
        )


def _is_child(pid: int, parent: int) -> bool:
    """Whether a process still is a child of another one. Asking a process for its children would read all processes."""
    with suppress(psutil.Error):
        return bool(psutil.Process(pid).ppid() == parent)
    return False


def _thread_times(pid: int, thread: int) -> tuple[float, float]:
    """Returns the seconds that a thread has been on a processor, and that it has waited for one."""
    with suppress(OSError, ValueError):
        cpu_ns, queue_ns, _ = Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()
        return int(cpu_ns) / 1e9, int(queue_ns) / 1e9
    return 0.0, 0.0


class Memory(NamedTuple):
    """Of a process, in bytes. own: each page divided by the processes that share it (PSS), without files. resident:
    each page that it has (RSS). What is shared by copy-on-write counts in the resident set of each process, which does
    not grow when one writes to a page and gets a copy of its own."""

    own: int
    resident: int


def memory_of(pid: int) -> Memory:
    """Reads the memory of a process; nothing of one that has ended."""
    with suppress(OSError, ValueError, KeyError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        sizes = {line.split(":")[0]: 1024 * int(line.split()[1]) for line in lines[1:]}
        return Memory(sizes["Pss_Anon"] + sizes["Pss_Shmem"], sizes["Rss"])
    return Memory(0, 0)
