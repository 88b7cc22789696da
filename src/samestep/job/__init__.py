"""Job: a training job, independent of engine, rank and device. The only code that a user writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from samestep.job.batch import Batch as Batch
from samestep.job.batch import MicroBatch as MicroBatch
from samestep.job.batch import StepInfo as StepInfo
from samestep.job.batch import apply_to_inputs as apply_to_inputs
from samestep.job.batch import counts_by_itself as counts_by_itself
from samestep.job.batch import output_and_state as output_and_state
from samestep.job.batch import reads_batch as reads_batch
from samestep.job.checks import check_job, refuse_unknown
from samestep.job.fields import JobFields
from samestep.job.orders import ByLength as ByLength
from samestep.job.orders import Lanes as Lanes
from samestep.job.orders import Weighted as Weighted
from samestep.job.phases import LRSchedule as LRSchedule
from samestep.job.phases import Phase as Phase
from samestep.job.phases import Recipe as Recipe
from samestep.job.phases import check_phases, in_turn


@dataclass(frozen=True)
class Job(JobFields):
    __doc__ = JobFields.__doc__  # for help(Job)

    def __new__(cls, *values: Any, **named: Any) -> Job:
        refuse_unknown(cls, named)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if self.phases:
            self._take_phases()
        check_job(self)

    def _take_phases(self) -> None:
        """Sets the optimizer, and what evaluation uses, from the phases."""
        check_phases(self.phases, self.model, self.optimizer)
        phases = tuple(replace(phase, forward=phase.forward or self.forward) for phase in self.phases)
        object.__setattr__(self, "phases", phases)
        object.__setattr__(self, "optimizer", in_turn(phases))
        if self.criterion is None:
            object.__setattr__(self, "criterion", phases[0].criterion)
            object.__setattr__(self, "forward", phases[0].forward)

    def of_phases(self) -> list[Job]:
        """Returns a job for each phase, with its criterion, forward and optimizer; without phases the job itself."""
        return [
            replace(self, phases=(), criterion=p.criterion, forward=p.forward or self.forward, optimizer=p.optimizer)
            for p in self.phases
        ] or [self]


def with_recipes(job: Job, change: Callable[[Recipe], Recipe]) -> Job:
    """Returns `job` with a changed recipe of its optimizer, or of that of each phase."""
    if not job.phases:
        return replace(job, optimizer=change(job.optimizer))
    return replace(job, phases=[replace(phase, optimizer=change(phase.optimizer)) for phase in job.phases])
