"""Job, without samestep's checks of its values, and which of its parts a script cannot train."""

from __future__ import annotations

from dataclasses import dataclass

from samestep.job.fields import JobFields

CLOSURE = "an optimizer whose step needs a closure"


@dataclass(frozen=True)
class Job(JobFields):
    __doc__ = JobFields.__doc__


def special_parts(job: JobFields) -> set[str]:
    """Returns the parts of a job that a checkpoint of a script does not hold."""
    parts = {
        "ema": job.ema,
        "carry_state": job.carry_state,
        "gather_outputs": job.gather_outputs,
        CLOSURE: job.optimizer and job.optimizer.needs_closure,
    }
    return {name for name, has in parts.items() if has}


def untrained_parts(job: JobFields) -> set[str]:
    """Returns the parts of a job that no script trains."""
    parts = {
        "phases": job.phases,
        "batch_weight": job.batch_weight,
        "a scheduler with every='evaluation'": job.scheduler and job.scheduler.every == "evaluation",
    }
    return {name for name, has in parts.items() if has}
