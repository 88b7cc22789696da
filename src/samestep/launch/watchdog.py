"""The watchdog: notices that a training hangs, finds the rank that the others wait for, and ends the launch.

It reads the ranks' heartbeats, which costs them nothing. Only when none of them has done anything for the limit does it
ask for collectives and stacks.
"""

from __future__ import annotations

import math
import signal
import statistics
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from samestep.errors import TrainingFailed, say
from samestep.launch import Machines
from samestep.launch.hang import NONE_ENDED, Hang, explain
from samestep.launch.hung_rank import ask_recorder, collect, pids
from samestep.launch.stacks import place_of
from samestep.message import message
from samestep.records.files import replace_text
from samestep.world import heartbeat
from samestep.world.heartbeat import BUILDING, ENDING, STARTING, Pulse
from samestep.world.processes import TELL_S

POLL_S = 0.5
MOST_S = 2.0  # that count of the time between two polls: a suspended machine is no hang
FACTOR = 10  # times the median step
LEAST_S = 60.0  # without --stall
OTHER_LEAST_S = 600.0  # the same, of an evaluation and a checkpoint
FIRST_S = 600.0  # the same, until the first step has ended: it may compile, and libraries are imported
FIRST_FACTOR, FIRST_LEAST_S = 5, 120.0  # of that, times --stall, and at least
ELSEWHERE_S = 30.0  # more, where the rank at fault is on another machine: that one's command can name it
TURN_FACTOR, TURN_LEAST_S = 20, 30.0  # times what another thread took for the same, and at least
TIMEOUT_MARGIN = 0.05  # of --timeout: collectives raise then, and nobody could be asked any more
TIMEOUT_MARGIN_S = 4 * POLL_S  # the same, at least, and at most half of a short one
FILE = "hang.txt"


class Pace:
    """The heartbeat of one rank over time: how long it has done nothing, and how long it may."""

    def __init__(self) -> None:
        self.pulse = Pulse(0, STARTING, heartbeat.NONE, 0, {})
        self.silent_s = 0.0
        self._longest_s: dict[int, float] = {}  # activity -> the longest silence in it that has ended
        self._step_s: deque[float] = deque(maxlen=101)  # of the latest steps
        self._first_s = 0.0  # the first step's
        self._since_step_s = 0.0  # since a step was seen to end, without evaluations

    def update(self, pulse: Pulse | None, passed_s: float) -> None:
        """Takes what the rank has written. passed_s: seconds since the last call."""
        self.silent_s += passed_s
        self._since_step_s += passed_s if is_step(self.pulse.activity) else 0.0
        if pulse is None or (pulse.beats, pulse.activity) == (self.pulse.beats, self.pulse.activity):
            return
        before, self.pulse = self.pulse, pulse
        self._longest_s[before.activity] = max(self._longest_s.get(before.activity, 0.0), self.silent_s)
        self.silent_s = 0.0
        if pulse.taken > before.taken:
            step_s = self._since_step_s / (pulse.taken - before.taken)
            if before.taken:
                self._step_s.append(step_s)
            else:  # it may have compiled: it counts as long as there is no other
                self._first_s = step_s
        if pulse.taken != before.taken:
            self._since_step_s = 0.0

    def took_s(self, activity: int) -> float | None:
        """Returns the longest silence in an activity that has ended; None for an activity that has not."""
        return self._longest_s.get(activity)

    def limit_s(self, stall_s: float | None) -> float:
        """Returns how long it may do nothing. stall_s: --stall; None: chosen by the training's own pace."""
        activity = self.pulse.activity
        if activity == BUILDING and stall_s is None:
            return math.inf  # it may read a large file: it is told of, and ended at the deadline
        if activity in (STARTING, BUILDING, ENDING) or (is_step(activity) and not self.pulse.taken):
            return FIRST_S if stall_s is None else max(FIRST_LEAST_S, FIRST_FACTOR * stall_s)
        if stall_s is not None:
            return stall_s
        if is_step(activity):
            return max(LEAST_S, FACTOR * statistics.median(self._step_s or [self._first_s]))
        return max(OTHER_LEAST_S, FACTOR * self._longest_s.get(activity, 0.0))


def is_step(activity: int) -> bool:
    """Whether an activity is a part of a step."""
    return activity in (heartbeat.LOADING, heartbeat.FORWARD, heartbeat.BACKWARD, heartbeat.TRAINING)


def named_hang(
    folder: Path,
    ranks: Mapping[int, Pace],
    size: int,
    report: Path,
    ended: Mapping[int, int] = NONE_ENDED,
    *,
    number: int = signal.SIGUSR1,
    go_on: bool = False,
) -> Hang | None:
    """Asks the ranks that write into `folder` which of them the others wait for; None where all have ended meanwhile.

    report: the file for their stacks. size, ended: as of hang.explain. number, go_on: as of hung_rank.collect.
    """
    pulses = {rank: pace.pulse for rank, pace in ranks.items()}
    silent_s = {rank: pace.silent_s for rank, pace in ranks.items()}
    hung = collect(folder, pulses, silent_s, number=number, go_on=go_on)
    if not hung:
        return None
    hang = explain(hung, max(size, len(hung)), ended)
    replace_text(report, "\n".join([f"{hang.message}\n", *(rank.report() for rank in hung)]))
    return hang


class Watchdog:
    """Watches the ranks on this machine that write into `folder`. stall_s: as --stall; 0: watches nothing. as_threads:
    whether the ranks are threads of one process, which take turns."""

    def __init__(
        self, folder: Path, size: int, machines: Machines, stall_s: float | None, *, as_threads: bool = False
    ) -> None:
        self._as_threads = as_threads
        self._folder, self._size, self._machines, self._stall_s = folder, size, machines, stall_s
        self._ranks: dict[int, Pace] = {}
        self._polled_at = self._asked_at = time.monotonic()
        self._tell_s = TELL_S  # of silence, until it is told what is still being built

    def check(self) -> None:
        """Raises TrainingFailed, with the sentence that names the rank at fault, when the training hangs.

        To be called repeatedly.
        """
        now = time.monotonic()
        if self._stall_s == 0 or now - self._polled_at < POLL_S:
            return
        passed_s, self._polled_at = min(now - self._polled_at, MOST_S), now
        ranks = self._update(passed_s)
        # A rank that still starts has another limit: --timeout.
        if not ranks or any(rank.pulse.activity == STARTING for rank in ranks.values()):
            return
        self._tell(ranks)
        if all(rank.silent_s > rank.limit_s(self._stall_s) for rank in ranks.values()) or (
            self._as_threads and self._keeps_its_turn(ranks)
        ):
            self._fail(ranks, surely=True)
        elif self._is_near_timeout(ranks, now):
            self._fail(ranks, surely=False)

    def _update(self, passed_s: float) -> dict[int, Pace]:
        """Reads the heartbeats. Returns the ranks that have not ended."""
        running = {}
        for rank in pids(self._folder):
            if (self._folder / f"rank{rank}.json").exists() or (self._folder / f"error-rank{rank}.json").exists():
                continue
            running[rank] = self._ranks.setdefault(rank, Pace())
            running[rank].update(heartbeat.read(heartbeat.file_of(self._folder, rank)), passed_s)
        return running

    def _tell(self, ranks: Mapping[int, Pace]) -> None:
        """Says at which line a rank is that builds the job for long."""
        for number, rank in ranks.items():
            if rank.pulse.activity == BUILDING and rank.silent_s > self._tell_s:
                self._tell_s *= 2
                place = place_of(pids(self._folder)[number], self._folder / f"stack-rank{number}.txt")
                say(message("rank_builds_for_long", rank=number, silent_s=rank.silent_s, place=place))
                return

    def _keeps_its_turn(self, ranks: Mapping[int, Pace]) -> bool:
        """Whether the thread whose turn it is lets the others wait as long as no collective would, or, in a step, for
        far longer than another one took for the same. That thread has beaten last."""
        running = min(ranks.values(), key=lambda rank: rank.silent_s)
        activity = running.pulse.activity
        if activity in (BUILDING, ENDING):
            return False
        took = [s for rank in ranks.values() if rank is not running and (s := rank.took_s(activity)) is not None]
        limit_s = self._near_timeout_s
        if is_step(activity) and took:
            limit_s = min(limit_s, max(TURN_LEAST_S, TURN_FACTOR * max(took)))
        return running.silent_s > limit_s

    @property
    def _near_timeout_s(self) -> float:
        """The seconds of waiting after which a collective is about to raise."""
        timeout_s = self._machines.timeout_s
        return timeout_s - min(max(TIMEOUT_MARGIN * timeout_s, TIMEOUT_MARGIN_S), timeout_s / 2)

    def _is_near_timeout(self, ranks: Mapping[int, Pace], now: float) -> bool:
        """Whether a collective is about to raise because a rank has not come: it would name the wrong one."""
        near_s = self._near_timeout_s
        silent = [number for number, rank in ranks.items() if rank.silent_s > 0.9 * near_s]
        if not silent or now - self._asked_at < POLL_S:
            return False
        self._asked_at = now
        answers = (ask_recorder(self._folder, number) for number in silent)  # the one at fault waits in none
        collectives = (recorded.first_waiting for recorded in answers if recorded)
        return any(entered and time.time() - entered.created_ns / 1e9 > near_s for entered in collectives)

    def _fail(self, ranks: Mapping[int, Pace], *, surely: bool) -> None:
        """Asks the ranks and raises. surely: also where no rank of this machine is at fault, some seconds later."""
        late_s = min(rank.silent_s - rank.limit_s(self._stall_s) for rank in ranks.values())
        if not surely or len(ranks) < self._size or self._machines.nnodes > 1:
            # A rank of a busy machine may not answer in time, which alone does not make it the cause beside others.
            waits = self._all_wait(ranks, silence_waits=not surely and self._machines.nnodes > 1)
            if waits and (not surely or late_s < ELSEWHERE_S):
                return
        report = self._folder / FILE
        if hang := named_hang(self._folder, ranks, self._size * self._machines.nnodes, report):
            raise TrainingFailed(message("training_hangs", hang=hang.message, file=report))

    def _all_wait(self, ranks: Mapping[int, Pace], silence_waits: bool) -> bool:
        """Whether each rank of this machine waits in the same collective, for one on another machine.

        silence_waits: so does one that does not answer.
        """
        waits = set()
        for rank in ranks:
            recorded = ask_recorder(self._folder, rank)
            if recorded is None and silence_waits:
                continue
            wait = recorded.first_waiting if recorded else None
            waits.add((wait.group, wait.number, wait.what) if wait else None)
        return len(waits) <= 1 and None not in waits
