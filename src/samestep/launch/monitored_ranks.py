"""Watches the ranks of a command that samestep monitor runs: names those that hang, that part ways, or that fail first.

It reads the ranks' heartbeats, which costs them nothing. When all are silent it asks for their collectives, and reads
from /proc whether they work: an evaluation has no batches and steps of its own, and is no hang.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from samestep.launch import first_error, stacks
from samestep.launch.hang import Hang
from samestep.launch.hung_rank import Recorded, ask_recorder, pids
from samestep.launch.watchdog import FILE, MOST_S, OTHER_LEAST_S, POLL_S, Pace, named_hang
from samestep.message import Message, message
from samestep.records.record import Record
from samestep.world import heartbeat
from samestep.world.heartbeat import ENDING, Pulse
from samestep.world.processes import STACKS

ASK_S = 5.0  # of silence of all ranks, from one look at their collectives and their work to the next
WORK_SHARE = 0.02  # of the time on a processor: less is what idle threads take
WORK_BYTES = 1 << 20  # read and written between two looks
NEW_MS = 100  # until a process that is waited for is waited for by the kernel
AGAIN = 2.0  # times as long as a silence that ended by itself is the next one's limit, at least


class _Work:
    """What a rank and its children had used at a look."""

    def __init__(self, pid: int) -> None:
        self.at, self.cpu_s, self.io_bytes = time.monotonic(), 0.0, 0
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            for member in (process, *process.children(recursive=True)):
                with suppress(psutil.Error, AttributeError):
                    times, io = member.cpu_times(), member.io_counters()
                    self.cpu_s += times.user + times.system
                    self.io_bytes += getattr(io, "read_chars", 0) + getattr(io, "write_chars", 0)

    def is_more_than(self, before: _Work) -> bool:
        """Whether there was work since `before`."""
        share = (self.cpu_s - before.cpu_s) / max(self.at - before.at, 1e-3)
        return share > WORK_SHARE or self.io_bytes - before.io_bytes > WORK_BYTES


class _Rank(Pace):
    """The pace of a rank of this machine, whose script may do what no heartbeat tells. quiet_s: since it last noted
    something, or worked."""

    def __init__(self, pid: int) -> None:
        super().__init__()
        self.pid, self.quiet_s = pid, 0.0
        self.work: _Work | None = None
        self.recorded: Recorded | None = None

    def update(self, pulse: Pulse | None, passed_s: float) -> None:
        self.quiet_s += passed_s
        super().update(pulse, passed_s)
        if self.silent_s == 0.0:
            self.quiet_s, self.work = 0.0, None

    def look(self, folder: Path, rank: int) -> None:
        """Reads its collectives and what it has used; other collectives, or work outside of one, end its quiet."""
        before, work_before = self.recorded, self.work
        self.recorded, self.work = ask_recorder(folder, rank), _Work(self.pid)
        moved = before and self.recorded and before.last != self.recorded.last
        waits = bool(self.recorded and self.recorded.first_waiting)
        if work_before and (moved or (not waits and self.work.is_more_than(work_before))):
            self.quiet_s = 0.0
        if moved and self.recorded:
            since_s = time.time() - max(self.recorded.entered.values(), default=0) / 1e9
            self.silent_s = min(self.silent_s, max(0.0, since_s))


class _Exits(threading.Thread):
    """Notes when processes end, at once: a launcher ends the others a tenth of a second after the first one."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._poll, self._pids = select.poll(), dict[int, int]()
        self.ended_at: dict[int, float] = {}

    def add(self, pid: int) -> None:
        """Waits for a process, too."""
        with suppress(OSError, AttributeError):  # it has ended; or an old kernel
            descriptor = os.pidfd_open(pid)
            self._pids[descriptor] = pid
            self._poll.register(descriptor, select.POLLIN)
            if not self.is_alive():
                self.start()

    def run(self) -> None:
        while True:
            for descriptor, _ in self._poll.poll(NEW_MS):
                self._poll.unregister(descriptor)
                self.ended_at[self._pids.pop(descriptor)] = time.time()
                os.close(descriptor)


class MonitoredRanks:
    """The ranks that write into `folder`. stall_s: seconds without progress after which a hang is named; None: chosen
    by the pace of the training; 0: never. ends_hung: whether the command is ended when it hangs."""

    def __init__(self, folder: Path, stall_s: float | None, *, ends_hung: bool = False) -> None:
        self._folder, self._stall_s, self._ends_hung = folder, stall_s, ends_hung
        self._ranks: dict[int, _Rank] = {}
        self._left: dict[int, tuple[float, Pulse, int]] = {}  # rank -> when it ended, what it did then, its pid
        self._polled_at = self._looked_at = time.monotonic()
        self._exits = _Exits()
        self._kills = first_error.memory_kills()
        self._longest_s = 0.0  # the longest silence that was told, and ended by itself
        self.hang: Hang | None = None  # that goes on
        self._hung_s = 0.0

    @property
    def running(self) -> Mapping[int, tuple[int, Pulse]]:
        """The ranks that have not ended: their pids, and what they last wrote."""
        return {number: (rank.pid, rank.pulse) for number, rank in self._ranks.items()}

    def due_in(self) -> float:
        """Returns the seconds until poll() is to be called again."""
        return max(0.0, self._polled_at + POLL_S - time.monotonic())

    def poll(self) -> Iterator[Message]:
        """Looks at the ranks. Yields what there is to say of them."""
        now = time.monotonic()
        passed_s, self._polled_at = min(now - self._polled_at, MOST_S), now
        self._update(passed_s)
        ranks = self._ranks
        if not ranks or self._stall_s == 0:
            return
        silent_s = min(rank.silent_s for rank in ranks.values())
        if self.hang:
            if silent_s < self._hung_s:
                self._longest_s = max(self._longest_s, self._hung_s)
                yield message("ranks_go_on", silent_s=self._hung_s)
                self.hang, self._hung_s = None, 0.0
            else:
                self._hung_s = silent_s
                return
        if silent_s < ASK_S:
            return
        if now - self._looked_at >= ASK_S:
            self._looked_at = now
            for number, rank in ranks.items():
                rank.look(self._folder, number)
            if self._parts_ways():
                yield from self._name(silent_s)
                return
        if all(self._is_late(rank) for rank in ranks.values()):
            yield from self._name(silent_s)

    def _update(self, passed_s: float) -> None:
        for number, pid in pids(self._folder).items():
            pulse = heartbeat.read(heartbeat.file_of(self._folder, number))
            known = self._ranks.get(number)
            if known is None or known.pid != pid:
                if number in self._left and self._left[number][2] == pid:
                    continue
                known = self._ranks[number] = _Rank(pid)
                self._exits.add(pid)
            known.update(pulse, passed_s)
            if not stacks.is_alive(pid):
                self._left[number] = self._exits.ended_at.get(pid, time.time()), known.pulse, pid
                del self._ranks[number]
            else:
                self._left.pop(number, None)

    def _is_late(self, rank: _Rank) -> bool:
        limit_s = max(rank.limit_s(self._stall_s), AGAIN * self._longest_s)
        works = self._stall_s is None and rank.quiet_s < limit_s
        return rank.silent_s > (max(limit_s, OTHER_LEAST_S) if works else limit_s)

    def _parts_ways(self) -> bool:
        """Whether two ranks wait in other collectives under one number: neither can go on."""
        waits = [rank.recorded.first_waiting for rank in self._ranks.values() if rank.recorded]
        operations: dict[tuple[str, int], set[str]] = {}
        for collective in filter(None, waits):
            operations.setdefault((collective.group, collective.number), set()).add(collective.operation)
        return any(len(names) > 1 for names in operations.values())

    def _name(self, silent_s: float) -> Iterator[Message]:
        """Asks the ranks for their stacks, and says which of them the others wait for."""
        size = max(rank.pulse.clocks.world for rank in self._ranks.values())
        ended = {number: pulse.taken for number, (_, pulse, _) in self._left.items()}
        report, goes_on = self._folder.parent / FILE, not self._ends_hung
        if hang := named_hang(self._folder, self._ranks, size, report, ended, number=STACKS, go_on=goes_on):
            self.hang, self._hung_s = hang, silent_s
            yield message("training_hangs", hang=hang.message, file=report)

    def first_failure(self) -> Message | None:
        """Returns why the command has failed: what happened to the rank that failed or left first.

        To be called after the command has ended with another exit code than 0.
        """
        self._update(0.0)
        error = Record(self._folder).error()
        if error and not error.lost_peer:
            path = self._folder / f"error-rank{error.rank}.json"
            return message("first_error_of_rank", rank=error.rank, why=error.message, file=path)
        left = sorted((when, number, pulse) for number, (when, pulse, _) in self._left.items())
        silently = [departure for departure in left if not (self._folder / f"error-rank{departure[1]}.json").exists()]
        if not silently or (error and error.time < silently[0][0] - MOST_S):
            return message("only_lost_peers", rank=error.rank, why=error.message) if error else None
        _, number, pulse = silently[0]
        if pulse.activity == ENDING:
            if error is None:
                return None  # each has ended well: the command has its own reason
            return message(
                "rank_left_before_others", rank=number, steps=pulse.taken, other=error.rank, why=error.message
            )
        killed = first_error.memory_kills() - self._kills
        why = first_error.memory_limit_reached(killed) if killed else None
        return message("rank_was_ended", rank=number, steps=pulse.taken, why=why)
