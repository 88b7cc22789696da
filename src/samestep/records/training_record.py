"""What one rank observes in one training: the steps, the micro-batches and the evaluations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from samestep.records.costs import StepCost
from samestep.records.spot_check import SpotCheck


@dataclass(frozen=True)
class MicroBatchRecord:
    """One micro-batch as a process received it."""

    epoch: int
    """The epoch, counted from 0."""

    step: int
    """The step, counted from 0 over all epochs."""

    micro: int
    """The number of the micro-batch in its step, counted from 0."""

    indices: list[int]
    """The dataset indices of the rows."""

    weight: float
    """The sum of the rows' weights."""

    digests: list[str]
    """A digest of the tensors of each row."""

    loss: float | None = None
    """The mean loss over the rows, in the reference; None: an engine's, whose losses are in TrainingRecord.losses."""


@dataclass(frozen=True)
class EvaluationRecord:
    """One evaluation."""

    rows: int
    """The number of rows that all ranks together evaluated."""

    weight: float
    """The sum of the rows' weights in the loss."""

    sums: Mapping[str, float]
    """'loss' -> the sum over all rows of loss times weight; metric -> its sum over all rows, or its value if it is
    named in `whole`."""

    whole: tuple[str, ...] = ()
    """The names of the metrics that have one value for all rows, instead of a sum of values for each row."""

    means: Mapping[str, float] = field(default_factory=dict)
    """Name -> its sum divided by the weight, for the loss, or by the rows; empty in the reference."""

    indices: list[int] = field(default_factory=list)
    """The dataset indices of the rows that this rank evaluated; empty in the reference."""

    unsteady: tuple[str, ...] = ()
    """The names of the sums that depend on the number of rows in a batch, or on random numbers; only the reference
    looks for them."""

    def divisor(self, name: str) -> float:
        """Returns what a sum is divided by for its mean."""
        return 1.0 if name in self.whole else self.weight if name == "loss" else float(self.rows)

    def mean(self, name: str) -> float:
        """Returns the loss, or a metric, as a mean over the rows."""
        return self.sums[name] / self.divisor(name)


@dataclass(frozen=True)
class RestartRecord:
    """The steps of a run that was stopped and started again, as this rank counted them."""

    stopped_at: int
    """The number of optimizer steps done when the run was stopped."""

    continued_at: int
    """The number of optimizer steps done with which the run continued."""

    done: int
    """The number of optimizer steps done at the run's end."""

    saved_at: int | None = None
    """The number of optimizer steps done at the run's last checkpoint, which rank 0 reads; None: on other ranks."""


@dataclass(frozen=True)
class TensorRecord:
    """Sums over one rank's piece of a tensor, by which two states are compared. The sums over all pieces are those of
    the tensor."""

    size: int
    """The number of elements of the piece."""

    whole: int
    """The number of elements of the whole tensor."""

    magnitude: float
    """The sum of the absolute values."""

    mixed: float
    """The sum of the values, each times a weight that depends on the value's place in the tensor."""


@dataclass(frozen=True)
class TrainingRecord:
    """What one rank observed in one training."""

    losses: list[float] = field(default_factory=list)
    """[micro-batch] The mean loss over the micro-batch's rows."""

    step_of: list[int] = field(default_factory=list)
    """[micro-batch] The micro-batch's step, counted from 0 over all epochs."""

    weight_of: list[float] = field(default_factory=list)
    """[micro-batch] The weight of the micro-batch's rows in the step's mean loss."""

    step_s: list[float] = field(default_factory=list)
    """[step] The seconds that the step took, its wait for data included."""

    wait_s: list[float] = field(default_factory=list)
    """[step] The seconds that the step waited for data."""

    busy_s: list[float] = field(default_factory=list)
    """[step] The CPU seconds of the thread that trains, without loading."""

    fetch_s: float = 0.0
    """The seconds that loading all batches took."""

    fetch_cpu_s: float = 0.0
    """The CPU seconds that loading all batches took."""

    began_at: float | None = None
    """When the first batch was requested, in seconds of Unix time; None: no batch was requested."""

    start_digests: list[str] = field(default_factory=list)
    """A digest of each of the first weights and buffers, in the order of the state dict; for the proof only."""

    autocast: bool = False
    """Whether a forward pass was in autocast; for the proof only."""

    micro_batches: list[MicroBatchRecord] = field(default_factory=list)
    """The micro-batches in their order; for the proof only."""

    later: Mapping[int, list[int]] = field(default_factory=dict)
    """Epoch -> the dataset indices of this rank's rows in the epoch's first step, of epochs that are not trained; for
    the proof only."""

    rates: list[list[float]] = field(default_factory=list)
    """[optimizer step][parameter group] The learning rates; for the proof only."""

    end_digests: Mapping[str, int] = field(default_factory=dict)
    """Parameter, or part of one, that other ranks hold too -> a digest of its bits after the last step; for the proof
    only."""

    divided: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Parameter -> axis of the mesh along which ranks hold other parts of the parameter, or other parameters -> this
    rank's place along the axis; for the proof only."""

    skipped_steps: int = 0
    """The number of steps that did not update the weights, as after an overflow."""

    peak_memory_bytes: int | None = None
    """The most memory that the rank used: the GPU's, or the process's on a CPU; None: not measured."""

    evaluation: EvaluationRecord | None = None
    """The evaluation at the end, as this rank saw it; None: there was none."""

    asked_steps: int | None = None
    """The number of optimizer steps of the whole training; None: the training is not a run."""

    stopped: str | None = None
    """'early': ended by patience. 'requested': ended by a graceful stop. None: the training ran to its end."""

    curve: list[dict[str, float]] = field(default_factory=list)
    """The evaluations in their order, each {'step': …, 'loss': …, metric: …}."""

    best_at: int = -1
    """The index in `curve` of the best evaluation; -1: there is none."""

    resumed_from: int = 0
    """The number of optimizer steps that an earlier launch has done."""

    state: Mapping[str, TensorRecord] = field(default_factory=dict)
    """Tensor of the training's state -> its sums, at the interruption or after loading; empty: the training is not
    interrupted."""

    changes: tuple[str, ...] = ()
    """What differed when the training was continued on other data by --resume-changed-data."""

    spot_checks: tuple[SpotCheck, ...] = ()
    """The steps that were replayed on rank 0, with the replayed steps of earlier launches."""

    restart: RestartRecord | None = None
    """The steps of the run in the training 'life'; None: another training."""

    cost: StepCost | None = None
    """What a step costs this rank; None: not measured."""
