"""Carries the state that a job's forward returns to the same rows of the next step (Job.carry_state)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from samestep.job import Batch, output_and_state
from samestep.job.walk import mapped_tensors
from samestep.rank.weights import StateDict


class CarriedState:
    """The state of each micro-batch of this rank's step, detached: its rows continue those of the step before."""

    def __init__(self) -> None:
        self._epoch = -1
        self._of_micro: dict[int, Any] = {}

    def state_dict(self) -> StateDict:
        """Returns the state of all micro-batches, for a checkpoint."""
        return {"epoch": self._epoch, "of_micro": self._of_micro}

    def load_state_dict(self, state: Mapping[str, Any], device: str) -> None:
        """Takes the state of a checkpoint."""
        self._epoch = state["epoch"]
        self._of_micro = mapped_tensors(lambda tensor: tensor.to(device), dict(state["of_micro"]))

    def attach(self, batch: Batch) -> Batch:
        """Returns the batch with the state of its rows; None in the first step of an epoch, where no row continues."""
        if batch.micro_batch.epoch != self._epoch:
            self._epoch, self._of_micro = batch.micro_batch.epoch, {}
        return replace(batch, state=self._of_micro.get(batch.micro_batch.micro))

    def store(self, returned: Any, batch: Batch) -> Any:
        """Stores the state that forward returned for `batch`. Returns the output.

        A rank without rows keeps none: it computes other ranks' rows. Raises UserError where forward returned no pair.
        """
        output, state = output_and_state(returned)
        if batch.micro_batch.rows:
            self._of_micro[batch.micro_batch.micro] = detached(state)
        return output


def detached(state: Any) -> Any:
    """Returns a state whose tensors have no graph."""
    return mapped_tensors(Tensor.detach, state)
