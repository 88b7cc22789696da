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
    """Measure the unchanged job for `steps` steps, without the proof's observations. costs: then look at what a step
    costs, in a few steps more."""

    steps: int
    costs: bool = False
    name: str = "measure"
    kind: Literal["measure"] = "measure"


@dataclass(frozen=True)
class Interrupted:
    """One launch's part of a training that is interrupted, and continued by another launch.

    checkpoints: the folder through which the state goes from one to the other. part: which of the two this is.
    other_ranks: whether the other launch has another number of replicas.
    """

    checkpoints: str
    part: Literal["first", "rest"]
    other_ranks: bool = False


@dataclass(frozen=True)
class LifeOptions:
    """What `life` asks a run for, as the reference has found it to tell most.

    best, best_after: the metric, and 'min' or 'max', by which the best weights are saved before and after the restart;
    None: the last ones are. predictions: whether the outputs of the evaluation's rows are written.
    """

    best: tuple[str, str] | None = None
    best_after: tuple[str, str] | None = None
    predictions: bool = False


@dataclass(frozen=True)
class ProveTask:
    """One training of the proof.

    training: one of TRAININGS. dtype: 'float64', 'float32' for a model or an engine that float64 does not fit, or
    OWN_DTYPE.
    replicas: of the study; the subset's last batch does not divide evenly among them. sgd_lr: the learning rate of
    'sgd'. rows: of a step, where they are fewer than the job's; 0: the job's global batch. name: in the record.
    extremes: rows of the dataset that are trained beside evenly spaced ones, the first ones first.
    interrupted: None: it runs to its end in this launch. life: of the training of that name. notes_outputs: whether
    what modules return is written.
    """

    training: str
    steps: int
    dtype: str
    replicas: int
    sgd_lr: float
    engine_settings: Values = field(default_factory=dict)
    name: str = ""
    rows: int = 0
    extremes: tuple[int, ...] = ()
    interrupted: Interrupted | None = None
    life: LifeOptions = LifeOptions()
    notes_outputs: bool = False
    kind: Literal["prove"] = "prove"


@dataclass(frozen=True)
class RunTask:
    """Train the whole job.

    weights: the file for the trained weights. init, init_sha256: the file to start from. every: epochs between
    two evaluations, 0: only the last. every_steps: optimizer steps between two evaluations, besides. best: the metric,
    and 'min' or 'max', by which the best weights are saved; None saves the last. patience: how many evaluations without
    an improvement end the training. log: where steps and evaluations are written: of 'csv', 'tensorboard', 'wandb'.
    export: the folder for from_pretrained; None: none. checkpoint_every, keep, resume: as of rank.checkpoints.
    resume_changed_data: continue also where the data are others than the checkpoint's.
    stop_after: steps after which it is stopped, as by a graceful stop; None: it runs to its end. on_nan: what happens
    at a loss or gradient that is not finite. check_replicas: steps between two comparisons of the ranks' weights; 0:
    none. spot_check: steps between two that are replayed in one process; 0: none are. spot_check_stops: whether
    one that differs ends the training. profile: the first and the last optimizer step, counted from 1, that
    torch.profiler traces.
    """

    weights: str
    init: str | None = None
    init_sha256: str | None = None
    every: int = 1
    every_steps: int = 0
    best: tuple[str, str] | None = None
    patience: int | None = None
    log: tuple[str, ...] = ()
    export: str | None = None
    checkpoint_every: Interval | None = None
    keep: int = 3
    resume: str = "auto"
    resume_changed_data: bool = False
    stop_after: int | None = None
    on_nan: Literal["stop", "skip"] = "stop"
    check_replicas: int = 1000
    spot_check: int = 0
    spot_check_stops: bool = False
    profile: tuple[int, int] | None = None
    name: str = "run"
    kind: Literal["run"] = "run"


@dataclass(frozen=True)
class EvaluateTask:
    """Evaluate the weights in the file `init`. predictions: the file for the model's outputs."""

    init: str
    init_sha256: str
    predictions: str | None = None
    name: str = "evaluate"
    kind: Literal["evaluate"] = "evaluate"


Task = Annotated[MeasureTask | ProveTask | RunTask | EvaluateTask, Field(discriminator="kind")]


@dataclass(frozen=True)
class Plan:
    """What each rank of a launch does. out: the folder for its files. started_at: Unix time, in seconds.

    threads: of a rank that measures, trains or evaluates; 0: the machine's cores divided by `nproc`, the study's
    ranks on each machine. proof_threads: of a rank that proves. asked: the request, which ranks compare when they meet.
    mesh: how the ranks are arranged; None: each is a replica.
    """

    IS_PRIVATE: ClassVar = True  # it holds settings or arguments as they were given

    out: str
    started_at: float
    job: str
    settings: Mapping[str, str]
    engine: str
    engine_settings: Values = field(default_factory=dict)
    trainings: tuple[Task, ...] = ()
    threads: int = 1
    nproc: int = 1
    proof_threads: int = 1
    asked: LaunchRequest | None = None
    mesh: Mesh | None = None


@dataclass(frozen=True)
class ContinuedLayout:
    """The layout with which an interrupted training continues: replicas, split and buffers as in engine.Layout."""

    replicas: int
    split: Literal["even", "chunk"]
    buffers: Literal["rank0", "local"]
    micro_batches: int = 1


@dataclass(frozen=True)
class Subset:
    """The part of the job that trainings take: as many steps, of so many rows, cut for so many replicas; as of
    ReferencePlan."""

    steps: int
    replicas: int
    rows: int = 0


def second_size(ranks: int, global_batch: int) -> int:
    """Returns the second number of ranks for which a job is proven that has `ranks`; 0 where it has too few rows.

    Five show what two and three hide, such as a mean over 2 or a fault of the ranks above 3. A number that divides the
    first one would hide what that one hides.
    """
    return next((size for size in (5, 3, 7, 2) if size <= global_batch and ranks % size), 0)


@dataclass(frozen=True)
class LayoutPlan:
    """A layout that the reference plays, and its rounding.

    replicas, split, buffers, micro_batches: as in engine.Layout. rounds_to: the dtype that gradients pass through.
    rounds_weights: whether the weights are rounded to it too. exact_steps: how many first steps are exact. rounds: as
    of engine.Numerics. dtype: the widest to use. neutral: with random numbers that each row keeps, and without batch
    statistics. constant: with constant random numbers instead. compared: compared with the other layouts only, with no
    engine: its tensors are not written, and its weights not evaluated. then: the layout after the interruption; None:
    the same. subset: what its trainings take; None: the plan's. That of a second number of ranks has its own.
    """

    replicas: int = 1
    split: Literal["even", "chunk"] = "even"
    buffers: Literal["rank0", "local"] = "rank0"
    rounds_to: str | None = None
    rounds_weights: bool = False
    exact_steps: int = 0
    rounds: Literal["passes", "sums", "all"] = "all"
    dtype: str = "float64"
    neutral: bool = False
    constant: bool = False
    compared: bool = False
    trainings: tuple[str, ...] = TRAININGS
    then: ContinuedLayout | None = None
    subset: Subset | None = None
    micro_batches: int = 1


@dataclass(frozen=True)
class Suspect:
    """A training that differs, with the values that were found, which the reference replays with candidate faults.

    training: of the proof. quantity, step: of the first difference; after the last step: the final weights differ, or
    what is of no step. steps_of: [process][micro-batch], the step of each. found, expected: the loss of each, times the
    weight of its rows, as the engine had it and as the reference did. bounds: [step], what rounding explains of these.
    rates, expected_rates: [optimizer step][parameter group]. tensors: (folder, name) of the engine's final tensors and
    of the reference's. tensor_bounds: what rounding explains of each tensor that is compared.
    """

    training: ProveTask
    quantity: str
    step: int
    steps_of: list[list[int]]
    found: list[list[float]]
    expected: list[list[float]]
    bounds: list[float]
    rates: list[list[float]]
    expected_rates: list[list[float]]
    tensors: tuple[tuple[str, str], tuple[str, str]]
    tensor_bounds: Mapping[str, float]


@dataclass(frozen=True)
class ReferencePlan:
    """The trainings that the reference plays. replicas: of the study; they decide the subset's size. steps: of each
    training.

    rows, extremes: see ProveTask. noise_runs: how often each training is played again with noise in the rounding.
    threads: of the reference; 0: all cores. notes_outputs: whether what modules return in `gradient` is written.
    suspect: instead of the trainings of its one layout, this one is replayed with candidate faults.
    """

    IS_PRIVATE: ClassVar = True  # it holds settings or arguments as they were given

    out: str
    started_at: float
    job: str
    settings: Mapping[str, str]
    layouts: tuple[LayoutPlan, ...]
    steps: int
    replicas: int
    rows: int = 0
    extremes: tuple[int, ...] = ()
    noise_runs: int = 2
    threads: int = 1
    notes_outputs: bool = False
    suspect: Suspect | None = None

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
