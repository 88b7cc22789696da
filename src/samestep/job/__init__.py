"""Job: a training job, independent of engine, rank and device. The only code that a user writes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from samestep.errors import UserError, nearest
from samestep.job.checks import (
    check_carried,
    check_dataset,
    check_functions,
    check_optimizer,
    check_workers,
    nested,
    shown,
)
from samestep.job.optimizer import LRSchedule as LRSchedule
from samestep.job.optimizer import Phase as Phase
from samestep.job.optimizer import Recipe as Recipe
from samestep.job.orders import ByLength as ByLength
from samestep.job.orders import Lanes as Lanes
from samestep.job.orders import Weighted as Weighted
from samestep.job.phases import check_phases, in_turn

if TYPE_CHECKING:  # a job is plain values: importing samestep must not import torch
    import numpy as np
    from numpy.typing import NDArray
    from torch import Generator, Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler


class Dataset(Protocol):
    """A map-style dataset, as torch's DataLoader takes it. `__getitems__(indices)`, where defined, fetches a batch."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


@dataclass(frozen=True)
class Part:
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
    part: the rows' step, micro-batch, sample indices and share of the step.
    fetch_s: seconds that a loader process took to fetch them; None where the training process fetched them.
    fetch_cpu_s: the CPU time of these; the rest was spent waiting for a disk, a network or a CPU.
    state: what `forward` returned for the same rows of the step before, with Job.carry_state; None where an epoch
    begins, in an evaluation, and without carry_state.
    """

    data: Any
    part: Part
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
        return self.part.completes_step

    @property
    def completes_epoch(self) -> bool:
        """True on the last micro-batch of an epoch."""
        return self.part.completes_epoch


def _is_pair(data: Any) -> bool:
    return isinstance(data, (list, tuple)) and len(data) == 2


def counts_by_itself(metric: Any) -> bool:
    """Whether a metric is a torchmetrics one, with a state over many batches, not a function of each row."""
    return hasattr(metric, "merge_state")


def reads_batch(metric: Any) -> bool:
    """Whether a torchmetrics metric is updated with (output, batch), because its update's second argument is `batch`;
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


@dataclass(frozen=True)
class Job:
    """A training job. See docs/job.md for each field with an example. Raises UserError for invalid values.

    model: builds the network, with identical weights at every call.
    criterion: (output, batch) -> scalar, the mean over the rows of the batch.
    phases: several optimizers, which take steps in turn on the same rows, each with its own parameters, criterion and
        forward; `optimizer` is then left out. Without a `criterion` the first phase's is evaluated, on its forward.
    metrics: name -> (output, batch) -> one value per row (shape [rows]), or a torchmetrics metric, which is called with
        (output, batch.targets), or with (output, batch) where its update's second argument is named batch; evaluation
        sums them exactly.
    global_batch: rows of one optimizer step, over all ranks.
    micro_batch: the most rows that a rank processes at once; None: all of its rows.
    gather_outputs: the criterion sees the outputs and the batches of all ranks, and so all rows of a step at once.
    ema: the decay of an exponential moving average of the weights, which is evaluated and saved in their place.
    save: what weights.safetensors holds: all weights and buffers, or the trainable ones, as of a LoRA.
    carry_state: forward returns (output, state), and finds the state of the same rows in the next step's batch.state,
        detached; the criterion and the metrics see the output.
    clip_norm: the global norm that gradients are clipped to before the optimizer steps.
    weight: (index) -> the weight of a training sample in the criterion's mean (for instance its tokens); None: every
        row weighs 1. evaluation_weight: the same for the evaluation's samples.
    augment: (sample, generator) -> sample; the generator is seeded by (seed, epoch, index), never by rank or worker.
    max_steps: optimizer steps, of all phases together, after which the training ends, whatever `epochs` is; None:
        after `epochs`.
    last: keep or drop an epoch's incomplete last batch.
    order: an epoch's rows in their order: Weighted, ByLength, Lanes, or (epoch, generator) -> indices; None: by
        `shuffle`.
    shuffle: whether each epoch is shuffled anew; False: the dataset's order, as a Stream needs.
    sync_batchnorm: BatchNorm's statistics over all ranks' rows, with torch's SyncBatchNorm (on GPUs only).
    workers: loader processes per rank; 0 loads in the training process, where a plain TensorDataset is always indexed.
    prefetch: batches that each loader process loads in advance.
    on_step: (StepInfo) -> None, called on rank 0 of `run` after each step, some steps late. on_evaluation:
        (step, metrics) -> None, called there after each evaluation. What they raise does not end the training.
    """

    model: Callable[[], nn.Module]
    criterion: Callable[[Any, Batch], Tensor] = None  # type: ignore[assignment]  # the first phase's
    optimizer: Recipe = None  # type: ignore[assignment]  # made of the phases'
    train: Dataset = None  # type: ignore[assignment]
    global_batch: int = 0
    evaluation: Dataset | None = None
    forward: Callable[[nn.Module, Batch], Any] = apply_to_inputs
    metrics: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    collate: Callable[[list[Any]], Any] | None = None
    augment: Callable[[Any, Generator], Any] | None = None
    weight: Callable[[int], float] | None = None
    evaluation_weight: Callable[[int], float] | None = None
    scheduler: LRSchedule | None = None
    epochs: int = 1
    max_steps: int | None = None
    ema: float | None = None
    save: Literal["all", "trainable"] = "all"
    seed: int = 0
    micro_batch: int | None = None
    gather_outputs: bool = False
    clip_norm: float | None = None
    last: Literal["keep", "drop"] = "keep"
    order: Weighted | ByLength | Lanes | Callable[[int, Generator], Sequence[int]] | None = None
    shuffle: bool = True
    sync_batchnorm: bool = False
    workers: int = 0
    prefetch: int = 2
    on_step: Callable[[StepInfo], None] | None = None
    on_evaluation: Callable[[int, dict[str, float]], None] | None = None
    # Younger fields come last: jobs that give theirs by place stay as they are.
    phases: Sequence[Phase] = ()
    carry_state: bool = False

    def __post_init__(self) -> None:
        if self.phases:
            self._take_phases()
        check_optimizer(self.optimizer, isinstance(self.optimizer, Recipe))
        check_functions(self.model, self.criterion)
        check_dataset("train", self.train)
        if self.evaluation is not None:
            check_dataset("evaluation", self.evaluation)
        if self.shuffle and any(getattr(each, "one_order", False) for each in nested(self.train)):
            raise UserError("a Stream cannot be shuffled: it is read in its order; set Job(shuffle=False)")
        for name in ("global_batch", "epochs", "max_steps", "micro_batch", "clip_norm", "prefetch"):
            value = getattr(self, name)
            if name != "clip_norm" and value is not None and not isinstance(value, int):
                raise UserError(f"{name} is {value!r}, a {type(value).__name__}; it must be a whole number")
            if value is not None and not value > 0:
                raise UserError(f"{name} is {value}; it must be above 0")
        if not isinstance(self.workers, int) or self.workers < 0:
            raise UserError(f"workers is {self.workers!r}; it must be a whole number, 0 or above")
        check_workers(self.workers)
        if self.gather_outputs and self.micro_batch is not None:
            raise UserError(
                f"micro_batch is {self.micro_batch}, and gather_outputs=True computes the loss over all rows of a step "
                "at once; leave out one of them"
            )
        for name in {"loss", "step"} & {*self.metrics}:
            raise UserError(
                f"a metric is called '{name}', a name that the evaluation curve uses itself; give it another name"
            )
        if self.last not in ("keep", "drop"):
            raise UserError(f"last is '{self.last}'; it must be 'keep' or 'drop'")
        if self.save not in ("all", "trainable"):
            raise UserError(f"save is '{self.save}'; it must be 'all' or 'trainable'")
        if self.ema is not None and not 0 < self.ema < 1:
            raise UserError(f"ema is {self.ema}; it is a decay between 0 and 1, such as 0.999")
        self._check_scheduler()
        self._check_order()

    def _check_order(self) -> None:
        if self.order is not None and not self.shuffle:
            raise UserError("order and shuffle=False each say the order of the rows; leave out one of them")
        if isinstance(self.order, Weighted | ByLength):
            self.order.check(len(self.train))
        elif self.order is not None and not isinstance(self.order, Lanes) and not callable(self.order):
            kind = type(self.order).__name__
            raise UserError(
                f"order is a {kind}; give Weighted, ByLength, Lanes() or a function (epoch, generator) -> indices"
            )
        if self.carry_state:
            in_lanes = not (self.order is None or isinstance(self.order, Weighted | ByLength)) or not self.shuffle
            if self.phases:
                raise UserError(
                    "carry_state=True with phases: each phase would take the state of the one before it; leave out one"
                )
            check_carried(self.forward is apply_to_inputs, in_lanes, self.last)
        if self.last == "drop" and self.order is None and len(self.train) < self.global_batch:
            raise UserError(
                f"last=drop leaves no step: the dataset has {len(self.train)} rows, fewer than global_batch "
                f"{self.global_batch}; set a smaller global_batch or last=keep"
            )

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

    def _check_scheduler(self) -> None:
        if self.scheduler is None:
            return
        if not isinstance(self.scheduler, LRSchedule):
            raise UserError(
                f"scheduler is {shown(self.scheduler)}; it is built with the optimizer: write "
                "scheduler=LRSchedule(lambda optimizer: CosineAnnealingLR(optimizer, 100))"
            )
        every, metric = self.scheduler.every, self.scheduler.metric
        if every not in ("step", "epoch", "evaluation"):
            raise UserError(f"the scheduler's every is '{every}'; it must be 'step', 'epoch' or 'evaluation'")
        if every == "evaluation" and self.evaluation is None:
            raise UserError("the scheduler's every is 'evaluation', and the job has none; give it Job(evaluation=…)")
        if every == "evaluation" and metric not in ("loss", *self.metrics):
            raise UserError(f"the scheduler's metric is '{metric}'; {nearest(metric, ['loss', *self.metrics])}")

    def output(self, model: nn.Module, batch: Batch) -> Any:
        """Calls `forward`. Returns its output, without the state where it carries one."""
        returned = self.forward(model, batch)
        return output_and_state(returned)[0] if self.carry_state else returned

    def steps(self, steps_per_epoch: int) -> int:
        """Returns the optimizer steps of the whole training."""
        return self.max_steps or self.epochs * steps_per_epoch

    def lr_scheduler(self, optimizer: Optimizer) -> LRScheduler:
        """Builds the job's scheduler of `optimizer` for the training loop; a constant one where the job has none, and
        where evaluations step it, outside of the loop."""
        from torch.optim.lr_scheduler import LambdaLR

        if self.scheduler is None or self.scheduler.every == "evaluation":
            return LambdaLR(optimizer, lambda _: 1.0)
        return self.scheduler.make(optimizer)

    def moves_lr(self, batch: Batch) -> bool:
        """Whether the scheduler steps after this batch: when it completes a step (of the last phase), or an epoch."""
        if self.scheduler is None or self.scheduler.every == "evaluation":
            return False
        if self.scheduler.every == "epoch":
            return batch.completes_epoch
        return batch.completes_step and batch.part.phase == max(0, len(self.phases) - 1)  # alike for all phases
