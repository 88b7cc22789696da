"""Job: what to train. It knows no engine, no rank and no device, and it is all that a user writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from samestep.errors import UserError

if TYPE_CHECKING:  # a job is plain values: importing samestep must not import torch
    import numpy as np
    from numpy.typing import NDArray
    from torch import Generator, Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler


class Dataset(Protocol):
    """What torch calls a map-style dataset. `__getitems__(indices)`, where it exists, fetches by the batch."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


@dataclass(frozen=True)
class Part:
    """One rank's rows of one micro-batch. `step` counts over all epochs, from 0.

    indices: the sample indices to fetch. rows: how many of them count; 0 where a rank has none of its own and
    runs others' rows times zero. weight: the sum of their weights.
    share: weight x world size / weight of the whole step. An engine averages gradients over the ranks, so the mean
    over this rank's rows, times its share, averages to the exact mean over the global batch.
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


@dataclass(frozen=True)
class Batch:
    """The rows of one micro-batch on one rank, on its device.

    data: what `collate` made of the samples. When it is an (inputs, targets) pair, these two name its halves;
    otherwise `inputs` is all of it and `targets` is None.
    part: where these rows stand in the training: step, micro-batch, sample indices, share of the step.
    fetch_s: seconds that fetching them took beside the training; None where the training itself fetched them.
    fetch_cpu_s: of these, how long a processor worked; the rest waited for a disk, a network or a processor.
    """

    data: Any
    part: Part
    fetch_s: float | None = None
    fetch_cpu_s: float = 0.0

    @property
    def inputs(self) -> Any:
        return self.data[0] if _is_pair(self.data) else self.data

    @property
    def targets(self) -> Any:
        return self.data[1] if _is_pair(self.data) else None

    @property
    def completes_step(self) -> bool:
        """True on the last micro-batch of a step: now the optimizer steps."""
        return self.part.completes_step

    @property
    def completes_epoch(self) -> bool:
        """True on the last micro-batch of an epoch."""
        return self.part.completes_epoch


def _is_pair(data: Any) -> bool:
    return isinstance(data, (list, tuple)) and len(data) == 2


@dataclass(frozen=True)
class Recipe:
    """How to build the optimizer, so that engines that shard can build it late, and others from its class.

    cls: for example torch.optim.AdamW. settings: its keyword arguments, `lr` among them.
    groups: turns the plain model into torch's parameter groups (a list of dicts); None: one group of all.
    """

    cls: type[Optimizer]
    settings: Mapping[str, Any] = field(default_factory=dict)
    groups: Callable[[nn.Module], list[dict[str, Any]]] | None = None

    def build(self, model: nn.Module) -> Optimizer:
        """The optimizer of `model`, which must be the plain module, not a wrapper that renames its parameters."""
        parameters = self.groups(model) if self.groups else model.parameters()
        return self.cls(parameters, **self.settings)


@dataclass(frozen=True)
class LRSchedule:
    """How the learning rate moves: `make(optimizer)` gives a torch scheduler, stepped once every step or epoch."""

    make: Callable[[Optimizer], LRScheduler]
    every: Literal["step", "epoch"] = "step"


def nested(dataset: Any) -> Iterator[Any]:
    """A dataset, what it is a subset of, what that is a subset of, …: each next one's `dataset`."""
    met: set[int] = set()  # one that names itself has no end
    while dataset is not None and id(dataset) not in met:
        met.add(id(dataset))
        yield dataset
        dataset = getattr(dataset, "dataset", None)


def check_dataset(name: str, dataset: Any) -> None:
    """Raises UserError for a dataset without a length or rows by index. name: 'train' or 'evaluation'."""
    kind = type(dataset).__name__
    iterable = any(base.__name__ == "IterableDataset" for base in type(dataset).__mro__)
    if iterable or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise UserError(
            f"{name} is a {kind}, which has no length or no rows by index; give a map-style "
            "dataset with __len__ and __getitem__, or wrap what is read from its beginning: "
            "samestep.Stream(dataset, length=…), with Job(shuffle=False)"
        )
    try:
        rows = len(dataset)
    except Exception as error:
        raise UserError(f"the length of {name}, a {kind}, cannot be had: {type(error).__name__}: {error}") from error
    if rows == 0:
        raise UserError(f"the {name} dataset has no rows" + ("; leave it out (None)" if name != "train" else ""))


def counts_by_itself(metric: Any) -> bool:
    """Whether a metric is one of torchmetrics', which counts over many batches, and no value for each row."""
    return hasattr(metric, "merge_state")


def apply_to_inputs(model: nn.Module, batch: Batch) -> Any:
    """The default `forward`: the model is called with the batch's inputs."""
    return model(batch.inputs)


@dataclass(frozen=True)
class Job:
    """A training job. See docs/job.md for each field with an example. Raises UserError for values that cannot be.

    model: builds the network, with the same bits at every call.
    criterion: (output, batch) -> scalar, the mean over the rows given.
    metrics: name -> (output, batch) -> one value per row (shape [rows]), or a metric of torchmetrics, which is given
        (output, batch.targets); evaluation adds them up exactly.
    global_batch: rows that one optimizer step sees, on any number of ranks.
    micro_batch: at most so many rows at once on a rank; None: all of the rank's rows.
    clip_norm: the global gradient norm is clipped to this before the optimizer steps.
    weight: the weight of a training sample in the criterion's mean (for instance its tokens), by its index; None:
        every row weighs 1. evaluation_weight: the same for the evaluation's samples.
    augment: (sample, generator) -> sample; the generator is keyed by (seed, epoch, index), never by rank or worker.
    last: what to do with an epoch's incomplete last batch.
    shuffle: whether each epoch has an order of its own; False: the dataset's order, as for a Stream.
    sync_batchnorm: BatchNorm takes its statistics over all ranks' rows, as torch's SyncBatchNorm does (on GPUs alone).
    workers: loader processes per rank; 0 loads in the training process. A plain TensorDataset is indexed there anyway.
    prefetch: batches that each loader process works ahead.
    """

    model: Callable[[], nn.Module]
    criterion: Callable[[Any, Batch], Tensor]
    optimizer: Recipe
    train: Dataset
    global_batch: int
    evaluation: Dataset | None = None
    forward: Callable[[nn.Module, Batch], Any] = apply_to_inputs
    metrics: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    collate: Callable[[list[Any]], Any] | None = None
    augment: Callable[[Any, Generator], Any] | None = None
    weight: Callable[[int], float] | None = None
    evaluation_weight: Callable[[int], float] | None = None
    scheduler: LRSchedule | None = None
    epochs: int = 1
    seed: int = 0
    micro_batch: int | None = None
    clip_norm: float | None = None
    last: Literal["keep", "drop"] = "keep"
    shuffle: bool = True
    sync_batchnorm: bool = False
    workers: int = 0
    prefetch: int = 2

    def __post_init__(self) -> None:
        check_dataset("train", self.train)
        if self.evaluation is not None:
            check_dataset("evaluation", self.evaluation)
        if self.shuffle and any(getattr(each, "one_order", False) for each in nested(self.train)):
            raise UserError("a Stream has one order, its own; say that it is not to be shuffled: Job(shuffle=False)")
        for name in ("global_batch", "epochs", "micro_batch", "clip_norm", "prefetch"):
            value = getattr(self, name)
            if name != "clip_norm" and value is not None and not isinstance(value, int):
                raise UserError(f"{name} is {value!r}, a {type(value).__name__}; it must be a whole number")
            if value is not None and not value > 0:
                raise UserError(f"{name} is {value}; it must be above 0")
        if not isinstance(self.workers, int) or self.workers < 0:
            raise UserError(f"workers is {self.workers!r}; it must be a whole number, 0 or above")
        for name in {"loss", "step"} & {*self.metrics}:
            raise UserError(f"a metric is called '{name}', which the curve has already; give it another name")
        if self.last not in ("keep", "drop"):
            raise UserError(f"last is '{self.last}'; it must be 'keep' or 'drop'")
        if self.scheduler is not None and self.scheduler.every not in ("step", "epoch"):
            raise UserError(f"the scheduler's every is '{self.scheduler.every}'; it must be 'step' or 'epoch'")
        if self.last == "drop" and len(self.train) < self.global_batch:
            raise UserError(
                f"last=drop leaves no step: the dataset has {len(self.train)} rows, fewer than global_batch "
                f"{self.global_batch}; set a smaller global_batch or last=keep"
            )

    def lr_scheduler(self, optimizer: Optimizer) -> LRScheduler:
        """The scheduler of this job on `optimizer`; a constant one where the job names none."""
        from torch.optim.lr_scheduler import LambdaLR

        return self.scheduler.make(optimizer) if self.scheduler else LambdaLR(optimizer, lambda _: 1.0)

    def moves_lr(self, batch: Batch) -> bool:
        """Whether the scheduler steps after the optimizer step that this batch completes."""
        if self.scheduler is None:
            return False
        return batch.completes_step if self.scheduler.every == "step" else batch.completes_epoch
