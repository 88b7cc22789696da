"""JobFields: what a job holds, and what a training asks of it. Job, in the folder's __init__, checks the values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from samestep.job.batch import Batch, StepInfo, apply_to_inputs, output_and_state
from samestep.job.orders import ByLength, Lanes, Weighted
from samestep.job.phases import LRSchedule, Phase, Recipe

if TYPE_CHECKING:  # a job is plain values: importing samestep must not import torch
    from torch import Generator, Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler


AnyJob = TypeVar("AnyJob", bound="JobFields")


class MapDataset(Protocol):
    """A map-style dataset, as torch's DataLoader takes it. `__getitems__(indices)`, where defined, fetches a batch."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


@dataclass(frozen=True)
class JobFields:
    """A training job. See docs/job.md for each field with an example. Job(…) raises UserError for invalid values.

    model: builds the network, with identical weights at every call.
    criterion: (output, batch) -> scalar, the mean over the rows of the batch; in an evaluation None where the model's
        output has no loss, as a detection model's.
    phases: several optimizers, which take steps in turn on the same rows, each with its own parameters, criterion and
        forward; `optimizer` is then left out. Without a `criterion` the first phase's is evaluated, on its forward.
    metrics: name -> (output, batch) -> one value per row (shape [rows]), which evaluation sums exactly, or an object
        with reset, update and compute, such as a torchmetrics metric. It is updated with (output, batch.targets), or
        with (output, batch) where its update's second argument is named batch, over all rows in their order.
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
    batch_weight: (batch) -> what the batch weighs in the criterion's mean, where collate decides that (for instance its
        masked tokens). It is summed over the ranks once a step, and decides the evaluation's loss, too.
    collate: as DataLoader's. evaluation_collate: the same for the evaluation's samples; None: `collate`, too.
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
    parallel: the name of a layer, in which * stands for any -> 'colwise', 'colwise_2', 'colwise_3', 'rowwise' or
        'colwise_gather': how tensor parallel ranks split its weight; or of a module -> 'stage': a stage of a pipeline
        begins with it. An engine for which it names nothing divides the model as a Hugging Face model's tp_plan says,
        or as is found in the model.
    on_step: (StepInfo) -> None, called on rank 0 of `run` after each step, some steps late. on_evaluation:
        (step, metrics) -> None, called there after each evaluation. What they raise does not end the training.
    """

    model: Callable[[], nn.Module]
    criterion: Callable[[Any, Batch], Tensor] = None  # type: ignore[assignment]  # the first phase's
    optimizer: Recipe = None  # type: ignore[assignment]  # made of the phases'
    train: MapDataset = None  # type: ignore[assignment]
    global_batch: int = 0
    evaluation: MapDataset | None = None
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
    evaluation_collate: Callable[[list[Any]], Any] | None = None
    batch_weight: Callable[[Batch], Tensor | float] | None = None
    parallel: Mapping[str, str] | None = None

    def output(self, model: nn.Module, batch: Batch) -> Any:
        """Calls `forward`. Returns its output, without the state where it carries one."""
        return output_and_state(self.forward(model, batch))[0] if self.carry_state else self.forward(model, batch)

    def evaluated(self: AnyJob) -> AnyJob:
        """Returns the job whose training data are the evaluation's, in their order, collated for it."""
        assert self.evaluation is not None
        collate = self.evaluation_collate or self.collate
        changed: dict[str, Any] = {"forward": self.output, "carry_state": False} if self.carry_state else {}
        return replace(self, train=self.evaluation, collate=collate, augment=None, order=None, last="keep", **changed)

    def steps(self, steps_per_epoch: int) -> int:
        """Returns the optimizer steps of the whole training."""
        return self.max_steps or self.epochs * steps_per_epoch

    def lr_scheduler(self, optimizer: Optimizer) -> LRScheduler:
        """Builds the job's scheduler of `optimizer` for the training loop; a constant one where the job has none, and
        where evaluations step it, outside of the loop."""
        if self.scheduler is None or self.scheduler.every == "evaluation":
            from torch.optim.lr_scheduler import LambdaLR

            return LambdaLR(optimizer, lambda _: 1.0)
        return self.scheduler.make(optimizer)

    def moves_lr(self, batch: Batch) -> bool:
        """Whether the scheduler steps after this batch: when it completes a step (of the last phase), or an epoch."""
        if self.scheduler is None or self.scheduler.every == "evaluation":
            return False
        if self.scheduler.every == "epoch":
            return batch.completes_epoch
        return batch.completes_step and batch.micro_batch.phase == max(0, len(self.phases) - 1)  # alike for all phases
