"""A launch of ranks that trains while the reference is played, where the machine has a core for each.

It is asked for the values that the reference will probably choose: its first learning rate, and float64. Where the
reference chooses others, the launch is of no use, and is started again.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from threading import Event

from samestep.records.plan import Plan
from samestep.records.record import Record
from samestep.world import resources

ShowPhase = Callable[[str], None]  # (the phase of one launch)


class LaunchAhead:
    """Runs a launch in a thread of this process, without showing its progress. It must be closed.

    start: runs the launch of a plan, calls its second argument about ten times a second, and returns the record.
    """

    def __init__(self, plan: Plan, start: Callable[[Plan, ShowPhase], Record]) -> None:
        self.plan = plan
        self._closed = Event()
        self._show: ShowPhase | None = None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="launch")
        self._record = self._executor.submit(start, plan, self._phase)

    def is_of(self, plan: Plan) -> bool:
        """Returns whether the launch trains what `plan` asks for."""
        return replace(self.plan, started_at=plan.started_at) == plan

    def record(self, show_phase: ShowPhase) -> Record:
        """Waits until the launch has ended. Returns its record, or raises its error."""
        self._show = show_phase
        return self._record.result()

    def close(self) -> None:
        """Ends the launch, if it still goes on."""
        self._closed.set()
        wait([self._record])
        self._executor.shutdown()

    def _phase(self, phase: str) -> None:
        if self._closed.is_set():
            raise Closed
        if self._show:
            self._show(phase)


class Closed(Exception):
    """Nobody waits for the launch any more."""


def has_cores_for(processes: int) -> bool:
    """Returns whether each of so many processes has a core, by this process's affinity and its control group."""
    usable = resources.usable_cores()
    return min(usable, resources.cpu_limit() or usable) >= processes
