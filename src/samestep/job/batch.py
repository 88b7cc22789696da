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
    """One rank's rows of one micro-batch. step: counted over all epochs, from 0.

    indices: the sample indices to fetch. rows: how many of them count; 0 where the rank has no rows in this step and
    computes other ranks' rows times zero. weight: the sum of their weights.
    share: weight x world size / weight of the whole step. An engine averages gradients over the ranks, so the mean
    over this rank's rows, times its share, averages to the exact mean over the global batch.
    repeats: how often each row has come before in this epoch; None where every row comes once.
    phase: the number of the job's phase that takes this step; 0 of a job without phases.
    """

    epoch: int
    step: int
    micro: int
    indices: NDArray[np.int64]
    rows: int
    weight: float
    share: float
    completes_step: bool
    completes_epoch: bool
    repeats: NDArray[np.int64] | None = None
    phase: int = 0


@dataclass(frozen=True)
class Batch:
    """The rows of one micro-batch on one rank, on its device.

    data: the collated samples. Of an (inputs, targets) pair, `inputs` and `targets` are the halves; otherwise `inputs`
    is all of it and `targets` is None.
    micro_batch: the rows' step, micro-batch, sample indices and share of the step.
    fetch_s: seconds that a loader process took to fetch them; None where the training process fetched them.
    fetch_cpu_s: the CPU time of these; the rest was spent waiting for a disk, a network or a CPU.
    state: what `forward` returned for the same rows of the step before, with Job.carry_state; None where an epoch
    begins, in an evaluation, and without carry_state.
    """

    data: Any
    micro_batch: MicroBatch
    fetch_s: float | None = None
    fetch_cpu_s: float = 0.0
    state: Any = None

    @property
    def inputs(self) -> Any:
        return self.data[0] if _is_pair(self.data) else self.data

    @property
    def targets(self) -> Any:
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
    """What Job.on_step is given after each optimizer step, on rank 0.

    step: how many have been taken. epoch: counted from 0. loss: the mean over rank 0's rows. rates: the learning rate
    of each parameter group in this step. rows: of the step, over all ranks. seconds: of the step, and wait_s: how many
    of them it waited for data.
    """

    step: int
    epoch: int
    loss: float
    rates: tuple[float, ...]
    rows: int
    seconds: float
    wait_s: float

    @property
    def samples_per_second(self) -> float:
        return self.rows / self.seconds if self.seconds else 0.0
