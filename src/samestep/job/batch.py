"""What a training gives to a job's functions: Batch, with its MicroBatch of the schedule, and StepInfo."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from samestep.errors import UserError
from samestep.job.function_checks import shown

if TYPE_CHECKING:  # a job is plain values: importing samestep must not import torch
    import numpy as np
    from numpy.typing import NDArray
    from torch import nn


@dataclass(frozen=True)
class MicroBatch:
    """One rank's rows of one micro-batch."""

    epoch: int
    """The number of the epoch, from 0."""

    step: int
    """The number of the step, counted over all epochs, from 0."""

    micro: int
    """The number of the micro-batch in its step, from 0."""

    indices: NDArray[np.int64]
    """The indices of the samples to fetch: shape [rows], or two other samples of the step where `rows` is 0."""

    rows: int
    """How many of these samples count. 0: the rank has no rows in this step, and computes other ranks' rows times
    zero."""

    weight: float
    """The sum of the rows' weights."""

    share: float
    """weight x world size / weight of the whole step. An engine averages gradients over the ranks, so the mean over
    this rank's rows, times its share, averages to the exact mean over the global batch."""

    completes_step: bool
    """Whether this is the last micro-batch of its step."""

    completes_epoch: bool
    """Whether this is the last micro-batch of its epoch."""

    repeats: NDArray[np.int64] | None = None
    """How often each row has come before in this epoch. None: every row comes once."""

    phase: int = 0
    """The number of the job's phase that takes this step. 0 in a job without phases."""


@dataclass(frozen=True)
class Batch:
    """The rows of one micro-batch on one rank, on its device."""

    data: Any
    """The collated samples. `inputs` and `targets` are the halves of an (inputs, targets) pair; otherwise `inputs` is
    all of the data and `targets` is None."""

    micro_batch: MicroBatch
    """The step, micro-batch, sample indices and share of the step of the rows."""

    fetch_s: float | None = None
    """Seconds that a loader process took to fetch the rows. None: the training process fetched them."""

    fetch_cpu_s: float = 0.0
    """The CPU time of `fetch_s`. The rest was spent waiting for a disk, a network or a CPU."""

    state: Any = None
    """What `forward` returned for the same rows of the step before, with Job.carry_state. None: an epoch begins, this
    is an evaluation, or the job has no carry_state."""

    @property
    def inputs(self) -> Any:
        """The first half of an (inputs, targets) pair; otherwise all of `data`."""
        return self.data[0] if _is_pair(self.data) else self.data

    @property
    def targets(self) -> Any:
        """The second half of an (inputs, targets) pair; otherwise None."""
        return self.data[1] if _is_pair(self.data) else None

    @property
    def completes_step(self) -> bool:
        """True on the last micro-batch of a step, after which the optimizer steps."""
        return self.micro_batch.completes_step

    @property
    def completes_epoch(self) -> bool:
        """True on the last micro-batch of an epoch."""
        return self.micro_batch.completes_epoch


def _is_pair(data: Any) -> bool:
    return isinstance(data, (list, tuple)) and len(data) == 2


def counts_by_itself(metric: Any) -> bool:
    """Whether a metric is an object with a state over many batches, as torchmetrics', not a function of each row."""
    return hasattr(metric, "update") and hasattr(metric, "compute")


def reads_batch(metric: Any) -> bool:
    """Whether such a metric is updated with (output, batch), because its update's second argument is `batch`;
    others are with (output, batch.targets)."""
    return "batch" in inspect.signature(metric.update).parameters


def apply_to_inputs(model: nn.Module, batch: Batch) -> Any:
    """Calls the model with the batch's inputs: the default `forward`."""
    return model(batch.inputs)


def output_and_state(returned: Any) -> tuple[Any, Any]:
    """Returns the two halves of what a forward with Job.carry_state returned. Raises UserError for anything else."""
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise UserError(
            f"carry_state=True: forward returned {shown(returned)}, not a pair (output, state); return the state too, "
            "or leave carry_state out"
        )
    return returned


@dataclass(frozen=True)
class StepInfo:
    """What Job.on_step is given after each optimizer step, on rank 0."""

    step: int
    """How many steps have been taken."""

    epoch: int
    """The number of the epoch, from 0."""

    loss: float
    """The mean loss over rank 0's rows."""

    rates: tuple[float, ...]
    """The learning rate of each parameter group in this step."""

    rows: int
    """The number of rows of the step, over all ranks."""

    seconds: float
    """How many seconds the step took."""

    wait_s: float
    """How many of these seconds the step waited for data."""

    @property
    def samples_per_second(self) -> float:
        return self.rows / self.seconds if self.seconds else 0.0
