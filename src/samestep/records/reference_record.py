"""What the reference records of the trainings that it plays, by layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from samestep.engine import Layout
from samestep.records.plan import LifeOptions
from samestep.records.training_record import EvaluationRecord, MicroBatchRecord


@dataclass(frozen=True)
class Moved:
    """How far a training moves a tensor."""

    distance: float
    """The greatest distance of any element between start and end."""

    largest_before: float
    """The greatest finite magnitude of any element at the start."""


@dataclass(frozen=True)
class ReferenceLifeRecord:
    """The evaluations, checkpoints and restart of a run of the reference."""

    every: int
    """The number of optimizer steps between two evaluations."""

    stop: int
    """The number of optimizer steps before the restart."""

    steps: int
    """The number of optimizer steps of the whole run."""

    at_step: list[int]
    """[evaluation] The number of optimizer steps done before the evaluation."""

    evaluations: list[EvaluationRecord]
    """The evaluations in their order."""

    before: EvaluationRecord | None
    """The evaluation of the weights that the run begins with; None: not evaluated."""

    best_at: int
    """The index in `evaluations` of the best one; -1: there is none."""

    options: LifeOptions
    """What an engine's run is asked for."""

    parameters: list[str]
    """The names of the parameters; of tied parameters, the first name."""

    own_losses: list[list[float]] = field(default_factory=list)
    """[replica][micro-batch] The losses of the first step from the model's own weights."""

    checkpoint_every: int = 0
    """The number of optimizer steps between two checkpoints."""

    distances: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Kind of tensors -> tensor -> the tensor's greatest distance from the run without noise; empty for the run without
    noise."""


@dataclass(frozen=True)
class ReferenceTrainingRecord:
    """One training of the reference."""

    micro_batches: list[list[MicroBatchRecord]]
    """[replica][micro-batch] The micro-batches in their order."""

    later: Mapping[int, list[list[list[int]]]]
    """Epoch -> [micro-batch][replica] -> the dataset indices of the rows in the epoch's first step, of epochs that are
    not trained."""

    rates: list[list[float]]
    """[step][parameter group] The learning rates."""

    norms: list[float]
    """[step] The norm of the gradient, before clipping."""

    draws: bool
    """Whether the model draws random numbers."""

    start_digests: list[str]
    """A digest of each of the first weights and buffers, in the order of the state dict."""

    parameters: list[str]
    """The names of the parameters."""

    length: int
    """The number of rows of the subset."""

    clip_norm: float | None = None
    """The norm to which the job clips gradients; None: it does not clip."""

    evaluation: EvaluationRecord | None = None
    """The evaluation of the last weights; None: not evaluated."""

    each_once: bool = True
    """Whether an epoch has every row once; an order of the job's own may repeat rows or leave them out."""

    distances: Mapping[str, float] = field(default_factory=dict)
    """Tensor -> the greatest distance of its final values from those of the training without noise; empty for the
    training without noise."""

    moved: Mapping[str, Moved] = field(default_factory=dict)
    """Tensor -> how far the training without noise moves it; empty for a training with noise."""

    phases: int = 1
    """The number of steps for which each batch is trained: one for each phase of the job."""

    life: ReferenceLifeRecord | None = None
    """What the run in the training 'life' does besides its steps; None: another training."""

    schedule: list[int] = field(default_factory=list)
    """[step] The step's number in the whole schedule; 'late' does not begin with 0."""


@dataclass(frozen=True)
class SeparationRecord:
    """The losses of a few rows in batches of different rows, of the untrained model: see reference/separation.py. A
    loss is NaN where the criterion refuses the rows."""

    weights: list[float]
    """[row] The row's weight."""

    whole: float
    """The loss of all rows together."""

    again: float
    """The loss of all rows together, by the model that has just computed `whole`."""

    alone: list[float]
    """[row] The loss of the row alone."""

    paired: int
    """The row that is in all `pairs`: the first with a finite loss other than 0; 0 where there is none."""

    pairs: list[float]
    """[other row] The loss of row `paired` together with the other row."""

    halves: list[float]
    """The losses of the first and of the second half of the rows."""

    output_gap: float | None
    """How far a row's output depends on the other rows, relative to its largest value; None: not comparable."""

    moved: list[str]
    """The names of the buffers and attributes that a forward pass changes."""

    unknown: list[str]
    """The names of the random operations whose numbers cannot be held."""

    collate_draws: bool
    """Whether the job's collate draws random numbers."""

    padded: bool = False
    """Whether a row's output depends on padding alone: outputs differ for padded rows, and for no other row."""

    gradient_gap: float | None = None
    """How far the gradient of a step's rows is from the mean of the gradients of its halves, relative to its largest
    value; None: the losses are not such means, or it cannot be computed."""


@dataclass(frozen=True)
class FromOne:
    """How far a parameter or buffer is from plain training's, after 'sgd'."""

    distance: float
    """The greatest distance of any element."""

    largest: float
    """The greatest finite magnitude of any element."""


@dataclass(frozen=True)
class ReferenceLayoutRecord:
    """The reference's trainings for one layout."""

    layout: Layout
    """The layout."""

    dtype: str
    """The dtype of the trainings."""

    float64_failed: str | None
    """Why `dtype` is not float64; None: it is."""

    rounds_to: str | None
    """The dtype to which gradients are rounded; None: the dtype of the training."""

    exact_steps: int
    """The number of first steps that are exact."""

    clip_norm: float | None
    """The norm to which the job clips gradients; None: it does not clip."""

    sgd_lr: float
    """The learning rate of 'sgd'."""

    sgd_lr_usual: float
    """The learning rate of 'sgd' that is tried first."""

    trainings: Mapping[str, list[ReferenceTrainingRecord]]
    """Training -> [without noise, with noise in its rounding, …]."""

    files: int = 0
    """The number in the names of the layout's files; layouts that train alike share it."""

    from_one: Mapping[str, FromOne] = field(default_factory=dict)
    """Parameter or buffer -> its distance from plain training's; empty where plain training was not played."""

    separation: SeparationRecord | None = None
    """The losses of a few rows alone and together; None: the layout has several replicas, or
    LayoutPlan.held_randomness is False."""

    draws: bool = False
    """Whether the job asked for random numbers; only where LayoutPlan.held_randomness is."""

    batch_statistics: bool = False
    """Whether the job asked for batch statistics; only where LayoutPlan.held_randomness is."""

    keyed: bool = False
    """Whether each row kept its own random numbers; only where LayoutPlan.held_randomness is."""

    running_statistics: bool = False
    """Whether the job asked only for averages of batch statistics; only where LayoutPlan.held_randomness is."""

    counts: tuple[str, ...] = ()
    """The names of the buffers of whole numbers."""

    scales: bool = True
    """Whether gradients follow the loss, so that the noise scales losses too."""

    written: tuple[str, ...] = ()
    """The names of the parameters that a forward pass sets to values of its rows."""

    then: Layout | None = None
    """The layout with which the training continues after its interruption; None: the same layout."""

    not_played: Mapping[str, str] = field(default_factory=dict)
    """Training, or OWN_DTYPE for all trainings in the job's own dtype -> why it could not be played."""

    rounds: Literal["passes", "sums", "all"] = "all"
    """What is rounded, as Numerics.rounds."""

    asks_rank: tuple[str, ...] = ()
    """The places at which the job asks for its rank or for the number of ranks, such as 'job.py:12'."""
