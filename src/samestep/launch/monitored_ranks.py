"""Watches the ranks of a command that samestep monitor runs: names those that hang, that part ways, or that fail first.

It reads the ranks' heartbeats, which costs them nothing. When all are silent it asks for their collectives, and reads
from /proc whether they work: an evaluation has no batches and steps of its own, and is no hang.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from samestep.errors import UserError
from samestep.launch import first_error, stacks
from samestep.launch.first_waits import FirstWaits, explain, has_absent, look, may_yet_come
from samestep.launch.hang import Hang
from samestep.launch.hung_rank import Recorded, ask_recorder, pids
from samestep.launch.rank_exits import BY_LAUNCHER, RankExits, last_words
from samestep.launch.watchdog import (
    FILE,
    FIRST_FACTOR,
    FIRST_LEAST_S,
    FIRST_S,
    MOST_S,
    OTHER_LEAST_S,
    POLL_S,
    Pace,
    named_hang,
)
from samestep.message import Message, message
from samestep.records.files import read
from samestep.records.rank_ends import END, RankEnd, Wait
from samestep.records.record import RankError, Record
from samestep.world import heartbeat
from samestep.world.heartbeat import ENDING, STARTING, Pulse
from samestep.world.processes import STACKS
from samestep.world.regular_files import paths_in

ASK_S = 5.0  # of silence of all ranks, from one look at their collectives and their work to the next
WORK_SHARE = 0.02  # of the time on a processor: less is what idle threads take
WORK_BYTES = 1 << 20  # read and written between two looks
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


@dataclass(frozen=True)
class _Departure:
    """A rank that has ended: when, what it did then, and its exit code, -N for a signal N; None: not known."""

    when: float
    rank: int
    pulse: Pulse
    pid: int
    code: int | None


class MonitoredRanks:
    """The ranks that write into `folder`. stall_s: seconds without progress after which a hang is named; None: chosen
    by the pace of the training; 0: never. ends_hung: whether the command is ended when it hangs."""

    def __init__(self, folder: Path, stall_s: float | None, *, ends_hung: bool = False) -> None:
        self._folder, self._stall_s, self._ends_hung = folder, stall_s, ends_hung
        self._ranks: dict[int, _Rank] = {}
        self._left: dict[int, _Departure] = {}
        self._polled_at = self._looked_at = time.monotonic()
        self._exits = RankExits()
        self._waits = FirstWaits(folder)
        self.stopped_at = math.inf  # when the command was asked to end
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
        if self._stall_s == 0:
            return
        waits = self._waits.update(passed_s) if self._none_trains() else []
        if waits or self._waits.hang:
            yield from self._name_absent(waits)
        if not ranks or waits:
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

    @property
    def were_seen(self) -> bool:
        """Whether any rank was seen so far."""
        return bool(self._ranks or self._left)

    def _none_trains(self) -> bool:
        return all(rank.pulse.activity == STARTING for rank in self._ranks.values())

    def _none_trained(self) -> bool:
        return self._none_trains() and all(each.pulse.activity == STARTING for each in self._left.values())

    def _name_absent(self, waits: Sequence[Wait]) -> Iterator[Message]:
        """Says who has not come, once the others have waited for the limit; and that they wait no more."""
        waited_s = self._waits.longest_s(waits)
        if self._waits.hang:
            if not self._none_trains() or self._waits.go_on():
                yield message("ranks_go_on", silent_s=self._waits.told_s)
                self._waits.hang = self.hang = None
            self._waits.told_s = max(self._waits.told_s, waited_s)
            return
        limit_s = FIRST_S if self._stall_s is None else self._stall_s
        if waited_s > limit_s:
            found = look(waits)
            hang = explain(waits, waited_s, found, self._why_gone())
            first_s = max(FIRST_LEAST_S, FIRST_FACTOR * limit_s)
            if waited_s > first_s or not may_yet_come(hang, found):
                self._waits.hang, self._waits.told_s, self.hang = hang, waited_s, hang
                yield hang.message

    def _why_gone(self) -> dict[int, Message]:
        """Returns why ranks have left or failed: rank -> what it has written of that."""
        why = {rank: end.left for rank, end in self._ends().items() if end.left}
        if error := Record(self._folder).error():
            why[error.rank] = error.message
        return why

    def _ends(self) -> dict[int, RankEnd]:
        ends = dict[int, RankEnd]()
        for path in paths_in(self._folder, END.format("[0-9]*")):
            with suppress(OSError, UserError):
                end = read(RankEnd, path)
                ends[end.rank] = end
        return ends

    def _update(self, passed_s: float) -> None:
        for number, pid in pids(self._folder).items():
            pulse = heartbeat.read(heartbeat.file_of(self._folder, number))
            known = self._ranks.get(number)
            if known is None or known.pid != pid:
                if number in self._left and self._left[number].pid == pid:
                    continue
                known = self._ranks[number] = _Rank(pid)
                self._exits.add(pid)
            known.update(pulse, passed_s)
            if not stacks.is_alive(pid):
                self._left[number] = _Departure(
                    self._exits.ended_at.get(pid, time.time()), number, known.pulse, pid, self._exits.code_of.get(pid)
                )
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
        ended = {number: departure.pulse.taken for number, departure in self._left.items()}
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
        first = self._first_to_leave(error)
        if first and first.pulse.activity == ENDING:
            return self._left_by_itself(first, error)
        is_certain = first and first.code not in (None, -signal.SIGTERM)
        waits = [] if is_certain or not self._none_trained() else self._waits.all()
        if waits and (self._waits.hang or error is None or has_absent(waits)):
            # A rank that was ended while it waited for others is not why these did not come.
            hang = explain(waits, self._waits.longest_s(waits), left=self._why_gone())
            return None if self._waits.hang else hang.message
        if first:
            return self._was_ended(first, error)
        return message("only_lost_peers", rank=error.rank, why=error.message) if error else None

    def _first_to_leave(self, error: RankError | None) -> _Departure | None:
        """Returns the rank that left first, if it did without an exception.

        Not one that the launcher may have ended: after the rank that failed, and by a signal that launchers send.
        error: of a rank that has lost another one.
        """
        silent = [each for each in self._left.values() if not (self._folder / f"error-rank{each.rank}.json").exists()]
        first = min(silent, key=lambda departure: departure.when, default=None)
        if first is None or first.when > self.stopped_at:
            return None
        if error and first.when > error.time:
            failed = self._left.get(error.rank)
            by_launcher = first.pulse.activity != ENDING and first.code in BY_LAUNCHER
            if first.when > error.time + MOST_S or (by_launcher and (failed is None or first.when > failed.when)):
                return None
        return first

    def _left_by_itself(self, first: _Departure, error: RankError | None) -> Message | None:
        if error is None:
            return None  # each has ended well: the command has its own reason
        ends = self._ends()
        left, other = ends.get(first.rank), ends.get(error.rank)
        entered = [end.entered for end in (left, other) if end and end.entered]
        last = [*dict.fromkeys(entered)] if len(entered) == 2 else []
        return message(
            "rank_left_before_others",
            rank=first.rank,
            steps=first.pulse.taken,
            how=left and left.left,
            other=error.rank,
            why=error.message,
            last=last[0] if last[1:] else None,
            entered=last[1] if last[1:] else None,
        )

    def _was_ended(self, first: _Departure, error: RankError | None) -> Message:
        killed = first_error.memory_kills() - self._kills
        fields = {
            "rank": first.rank,
            "steps": first.pulse.taken,
            "why": first_error.memory_limit_reached(killed) if killed else None,
            "said": last_words(self._exits.output_of.get(first.pid)),
            "other": error and error.rank,
            "other_why": error and error.message,
        }
        if first.code is None:
            return message("rank_was_ended", **fields)
        if first.code >= 0:
            return message("rank_left_python_at_once", **fields, code=first.code)
        return message("rank_was_ended_by_signal", **fields, signal=first_error.signal_name(-first.code))
