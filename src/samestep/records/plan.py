"""The plan of a launch: plan.json, which every rank reads."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from samestep.records.checkpoint import Interval
from samestep.records.inspection import Values
from samestep.records.launch_request import LaunchRequest
from samestep.world.mesh import Mesh

TRAININGS = ("gradient", "sgd", "user", "late", "life")  # of a proof
OUTPUTS = "{} outputs"  # the name of what modules have returned in a training
OWN_DTYPE = "own"  # the dtype of a training that leaves the job's tensors as they are
SGD_LR = 0.05  # of `sgd`, tried first; divided by 4 while the loss explodes
INIT = 0.875  # times the model's own weights: those that `life` begins with
TRACES = "trace"  # the folder of --profile's files


@dataclass(frozen=True)
class MeasureTask:
    """Measures the unchanged job, without the proof's observations."""

    steps: int
    """The number of optimizer steps to measure."""

    costs: bool = False
    """Whether a few more steps follow, in which the cost of a step is measured."""

    name: str = "measure"
    """The training's name in the record."""

    kind: Literal["measure"] = "measure"
    """The tag by which a task is read from JSON."""


@dataclass(frozen=True)
class Interrupted:
    """One launch's part of a training that is interrupted, and that another launch continues."""

    checkpoints: str
    """The folder through which the state passes from the first launch to the second."""

    part: Literal["first", "rest"]
    """Whether this launch trains the part before the interruption, or the rest."""

    other_ranks: bool = False
    """Whether the other launch has another number of replicas."""


@dataclass(frozen=True)
class LifeOptions:
    """The options of the run in the training 'life'. The reference chooses those that reveal most."""

    best: tuple[str, str] | None = None
    """The metric, and 'min' or 'max', by which the run saves its best weights before the restart; None: it saves the
    last weights."""

    best_after: tuple[str, str] | None = None
    """The same as `best`, for the part of the run after the restart."""

    predictions: bool = False
    """Whether the run writes the model's outputs for the evaluation's rows."""


@dataclass(frozen=True)
class ProveTask:
    """One training of the proof."""

    training: str
    """The kind of training: one of TRAININGS."""

    steps: int
    """The number of optimizer steps."""

    dtype: str
    """'float64'; 'float32' for a model or an engine that does not take float64; or OWN_DTYPE."""

    replicas: int
    """The number of replicas of the command; the last batch of the subset of rows does not divide evenly among them."""

    sgd_lr: float
    """The learning rate of 'sgd'."""

    engine_settings: Values = field(default_factory=dict)
    """The engine's settings in this training: name -> value."""

    name: str = ""
    """The training's name in the record."""

    rows: int = 0
    """The number of rows of a step; 0: the job's global batch. It equals the global batch where the job takes no other
    number of rows: then all batches have sizes that the job itself has."""

    extremes: tuple[int, ...] = ()
    """The indices of dataset rows that are trained beside evenly spaced ones, those that matter most first."""

    interrupted: Interrupted | None = None
    """Which part of the training this launch runs; None: the whole training."""

    life: LifeOptions = LifeOptions()
    """The options of the run, where `training` is 'life'."""

    notes_outputs: bool = False
    """Whether the outputs of the model's modules are written."""

    kind: Literal["prove"] = "prove"
    """The tag by which a task is read from JSON."""


@dataclass(frozen=True)
class RunTask:
    """Trains the whole job."""

    weights: str
    """The file for the trained weights."""

    init: str | None = None
    """The file with the weights to start from; None: the weights that the job's model is built with."""

    init_sha256: str | None = None
    """The SHA-256 digest of the file `init`; None: there is no such file."""

    every: int = 1
    """The number of epochs between two evaluations; 0: only an evaluation at the end."""

    every_steps: int = 0
    """The number of optimizer steps between two further evaluations; 0: no further evaluations."""

    best: tuple[str, str] | None = None
    """The metric, and 'min' or 'max', by which the best weights are saved; None: the last weights are saved."""

    patience: int | None = None
    """The number of evaluations without an improvement after which the training ends; None: it never ends early."""

    log: tuple[str, ...] = ()
    """Where steps and evaluations are logged: any of 'csv', 'tensorboard' and 'wandb'."""

    export: str | None = None
    """The folder to which the trained model is exported for from_pretrained; None: no export."""

    checkpoint_every: Interval | None = None
    """The interval between two checkpoints; None: no checkpoints."""

    keep: int = 3
    """The number of checkpoints to keep; older ones are removed."""

    resume: str = "auto"
    """The checkpoint to continue from: 'auto' for the newest of this run, 'never', or the path of a checkpoint or of a
    folder of checkpoints."""

    resume_changed_data: bool = False
    """Whether to continue although the data differ from the checkpoint's."""

    stop_after: int | None = None
    """The number of optimizer steps after which the training stops, as by a graceful stop; None: it runs to its end."""

    on_nan: Literal["stop", "skip"] = "stop"
    """What happens at a loss or gradient that is not finite: the training stops, or skips the step."""

    check_replicas: int = 1000
    """The number of steps between two comparisons of the ranks' weights; 0: no comparison."""

    spot_check: int = 0
    """The number of steps between two steps that one process replays; 0: no step is replayed."""

    spot_check_stops: bool = False
    """Whether the training ends where a replayed step differs."""

    profile: tuple[int, int] | None = None
    """The first and the last optimizer step that torch.profiler traces, counted from 1; None: no trace."""

    name: str = "run"
    """The training's name in the record."""

    kind: Literal["run"] = "run"
    """The tag by which a task is read from JSON."""


@dataclass(frozen=True)
class EvaluateTask:
    """Evaluates weights on the job's evaluation dataset."""

    init: str
    """The file with the weights."""

    init_sha256: str
    """The SHA-256 digest of the file `init`."""

    predictions: str | None = None
    """The file for the model's outputs; None: they are not written."""

    name: str = "evaluate"
    """The evaluation's name in the record."""

    kind: Literal["evaluate"] = "evaluate"
    """The tag by which a task is read from JSON."""


Task = Annotated[MeasureTask | ProveTask | RunTask | EvaluateTask, Field(discriminator="kind")]


@dataclass(frozen=True)
class Plan:
    """What each rank of a launch does."""

    IS_PRIVATE: ClassVar = True  # it holds settings or arguments as they were given

    out: str
    """The folder for the launch's files."""

    started_at: float
    """When the launch was started, in seconds of Unix time."""

    job: str
    """The job's name or path."""

    settings: Mapping[str, str]
    """The job's settings as --set gives them: name -> text."""

    engine: str
    """The engine's name."""

    engine_settings: Values = field(default_factory=dict)
    """The engine's settings: name -> value."""

    trainings: tuple[Task, ...] = ()
    """What the ranks do, in this order."""

    threads: int = 1
    """The number of threads of a rank that measures, trains or evaluates; 0: the machine's cores divided by `nproc`."""

    nproc: int = 1
    """The number of the command's ranks on each machine."""

    proof_threads: int = 1
    """The number of threads of a rank that runs a training of the proof."""

    asked: LaunchRequest | None = None
    """What the command trains, which ranks compare when they meet; None: nothing to compare."""

    mesh: Mesh | None = None
    """How the ranks are arranged; None: each rank is a replica."""


@dataclass(frozen=True)
class ContinuedLayout:
    """The layout with which an interrupted training continues."""

    replicas: int
    """The number of replicas, as Layout.replicas."""

    split: Literal["even", "chunk"]
    """How a step's rows are split among the replicas, as Layout.split."""

    buffers: Literal["rank0", "local"]
    """Whose buffers the replicas have, as Layout.buffers."""

    micro_batches: int = 1
    """The fewest micro-batches in a step on each replica, as Layout.micro_batches."""


@dataclass(frozen=True)
class Subset:
    """The part of the job that trainings of the reference take, where it is not the ReferencePlan's."""

    steps: int
    """The number of optimizer steps of each training."""

    replicas: int
    """The number of replicas for which the subset of rows is chosen."""

    rows: int = 0
    """The number of rows of a step, as ProveTask.rows; 0: the job's global batch."""


def second_size(ranks: int, global_batch: int) -> int:
    """Returns the second number of ranks for which a job is proven that has `ranks`; 0 where it has too few rows.

    Five show what two and three hide, such as a mean over 2 or a fault of the ranks above 3. A number that divides the
    first one would hide what that one hides.
    """
    return next((size for size in (5, 3, 7, 2) if size <= global_batch and ranks % size), 0)


@dataclass(frozen=True)
class LayoutPlan:
    """A layout in which the reference plays trainings, and how it rounds."""

    replicas: int = 1
    """The number of replicas, as Layout.replicas."""

    split: Literal["even", "chunk"] = "even"
    """How a step's rows are split among the replicas, as Layout.split."""

    buffers: Literal["rank0", "local"] = "rank0"
    """Whose buffers the replicas have, as Layout.buffers."""

    rounds_to: str | None = None
    """The dtype to which gradients are rounded; None: the dtype of the training."""

    rounds_weights: bool = False
    """Whether the weights are rounded to `rounds_to` too."""

    exact_steps: int = 0
    """The number of first steps that are exact."""

    rounds: Literal["passes", "sums", "all"] = "all"
    """What is rounded, as Numerics.rounds."""

    dtype: str = "float64"
    """The widest dtype to use, or OWN_DTYPE; the reference takes float32 where the model fails in float64."""

    held_randomness: bool = False
    """Whether each row keeps its own random numbers, and batch statistics are not used."""

    constant: bool = False
    """Whether all random numbers are constants instead, in a layout with `held_randomness`."""

    compared: bool = False
    """Whether the layout is compared with other layouts only, and with no engine: its tensors are not written, and its
    weights are not evaluated."""

    trainings: tuple[str, ...] = TRAININGS
    """The names of the trainings to play."""

    then: ContinuedLayout | None = None
    """The layout after the interruption; None: the same layout."""

    subset: Subset | None = None
    """The part of the job that the trainings take, as for a second number of ranks; None: that of the ReferencePlan."""

    micro_batches: int = 1
    """The fewest micro-batches in a step on each replica, as Layout.micro_batches."""


@dataclass(frozen=True)
class Suspect:
    """A training of an engine that differs from the reference, with the values that were found. The reference replays
    it with candidate faults."""

    training: ProveTask
    """The training of the proof that differs."""

    quantity: str
    """The quantity that differs first, as Divergence.quantity."""

    step: int
    """The step of the first difference. The number after the last step: the final weights differ, or a quantity that
    belongs to no step."""

    steps_of: list[list[int]]
    """[process][micro-batch] The step of each micro-batch."""

    found: list[list[float]]
    """[process][micro-batch] The engine's mean loss, times the weight of the rows."""

    expected: list[list[float]]
    """[process][micro-batch] The reference's mean loss, times the weight of the rows."""

    bounds: list[float]
    """[step] The difference of the losses that rounding explains."""

    rates: list[list[float]]
    """[optimizer step][parameter group] The engine's learning rates."""

    expected_rates: list[list[float]]
    """[optimizer step][parameter group] The reference's learning rates."""

    tensors: tuple[tuple[str, str], tuple[str, str]]
    """(folder, name) of the engine's final tensors, and of the reference's."""

    tensor_bounds: Mapping[str, float]
    """Tensor -> the difference that rounding explains, for each tensor that is compared."""


@dataclass(frozen=True)
class ReferencePlan:
    """The trainings that the reference plays, in one process."""

    IS_PRIVATE: ClassVar = True  # it holds settings or arguments as they were given

    out: str
    """The folder for the reference's files."""

    started_at: float
    """When the reference was started, in seconds of Unix time."""

    job: str
    """The job's name or path."""

    settings: Mapping[str, str]
    """The job's settings as --set gives them: name -> text."""

    layouts: tuple[LayoutPlan, ...]
    """The layouts to play."""

    steps: int
    """The number of optimizer steps of each training."""

    replicas: int
    """The number of replicas of the command, which decides the size of the subset of rows."""

    rows: int = 0
    """The number of rows of a step, as ProveTask.rows; 0: the job's global batch."""

    extremes: tuple[int, ...] = ()
    """The indices of dataset rows that are trained beside evenly spaced ones, as ProveTask.extremes."""

    noise_runs: int = 2
    """How often each training is played again with noise in its rounding."""

    threads: int = 1
    """The number of threads of the reference; 0: as many as the machine has cores."""

    notes_outputs: bool = False
    """Whether the outputs of the model's modules in 'gradient' are written."""

    suspect: Suspect | None = None
    """The training to replay with candidate faults, in the plan's one layout; None: the plan's trainings are played."""

    def subset_of(self, layout: LayoutPlan) -> Subset:
        """Returns what a layout's trainings take."""
        return layout.subset or Subset(self.steps, self.replicas, self.rows)


INTERRUPTED = ("sgd", "user")  # of the proof's trainings; 'gradient' has one step


def interruption(seed: int, training: str, steps: int, per_epoch: int, *, only_at_end: bool = False) -> int:
    """Returns the number of steps before a training of `steps` steps is interrupted, between 1 and steps - 1.

    One of the two trainings is interrupted at an epoch's end, where it has one, and the other one in an epoch; `seed`
    decides which. per_epoch: steps of an epoch. only_at_end: both at an epoch's end.
    """
    at_end = [step for step in range(1, steps) if step % per_epoch == 0]
    within = [step for step in range(1, steps) if step % per_epoch]
    ends_epoch = only_at_end or (seed + INTERRUPTED.index(training)) % 2 == 1
    drawn_from = (at_end if ends_epoch else within) or at_end or within
    digest = hashlib.blake2b(f"{seed}/interruption/{training}".encode(), digest_size=8).digest()
    return drawn_from[int.from_bytes(digest, "big") % len(drawn_from)]
