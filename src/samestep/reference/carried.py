"""The state that forward carries from step to step, kept for each replica's micro-batches."""

from __future__ import annotations

from typing import Any

from samestep.job import Batch, Job, output_and_state
from samestep.job.walk import mapped_tensors


class Carried:
    """What forward has returned for each (replica, micro-batch) in this epoch, without its graph."""

    def __init__(self, job: Job) -> None:
        self.carries = job.carry_state
        self.states: dict[tuple[int, int], Any] = {}

    def forget(self) -> None:
        """Forgets the states at the start of an epoch."""
        self.states.clear()

    def of(self, replica: int, micro: int) -> Any:
        """The state that the rows of a replica's micro-batch begin with."""
        return self.states.get((replica, micro))

    def keep(self, returned: Any, replica: int, micro: int) -> Any:
        """Takes the state out of what forward returned. Returns the output."""
        if not self.carries:
            return returned
        output, state = output_and_state(returned)
        self.states[replica, micro] = mapped_tensors(lambda tensor: tensor.detach().clone(), state)
        return output


def output_of(job: Job, model: Any, batch: Batch) -> Any:
    """What forward returns for a batch that continues nothing, without a state."""
    returned = job.forward(model, batch)
    return output_and_state(returned)[0] if job.carry_state else returned


def output_and_loss(job: Job, model: Any, batch: Batch) -> tuple[Any, Any]:
    """The same, and the criterion of it."""
    output = output_of(job, model, batch)
    return output, job.criterion(output, batch)
