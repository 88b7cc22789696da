"""The record of a launch: files that the ranks write and the parent reads.

A rank writes `rankR.json`, what it observed, and `rankR.NAME.npz`, tensors.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from samestep.engine import Layout
from samestep.message import Message
from samestep.records.collectives import CollectiveRank
from samestep.records.costs import StepCost
from samestep.records.files import is_current, read, write
from samestep.records.inspection import MachineFacts
from samestep.records.plan import LifeOptions, Plan
from samestep.records.spot_check import SpotCheck
from samestep.records.tensor_files import read_arrays
from samestep.records.trial import Trial
from samestep.world import World
from samestep.world.regular_files import paths_in

if TYPE_CHECKING:
    from numpy.typing import NDArray

PROGRESS = "progress.json"
ENVIRONMENT = "environment-of-rank0.json"  # rank 0's values of the variables that a launcher needs
ATTEMPT = "SAMESTEP_ATTEMPT"  # environment variable: how often the machines have met before; unset: torchrun counts
SAVE_VARIABLES = "SAMESTEP_SAVE_VARIABLES"  # environment variable: their names, separated by commas


@dataclass(frozen=True)
class MicroBatchRecord:
    """One micro-batch as a process received it. digests: of each row's tensors. loss: its mean, in the reference."""

    epoch: int
    step: int
    micro: int
    indices: list[int]
    weight: float
    digests: list[str]
    loss: float | None = None


@dataclass(frozen=True)
class EvaluationRecord:
    """One evaluation.

    rows: how many all ranks evaluated. weight: the sum of their weights in the loss. sums: the loss times the weight,
    and each metric, over all rows; for the metrics named in `whole`, the value. means: sums divided by weight or rows.
    indices: of the rows that this rank evaluated. unsteady: the sums that depend on the number of rows in a batch, or
    on random numbers.
    """

    rows: int
    weight: float
    sums: Mapping[str, float]
    whole: tuple[str, ...] = ()
    means: Mapping[str, float] = field(default_factory=dict)
    indices: list[int] = field(default_factory=list)
    unsteady: tuple[str, ...] = ()

    def divisor(self, name: str) -> float:
        """Returns what a sum is divided by for its mean."""
        return 1.0 if name in self.whole else self.weight if name == "loss" else float(self.rows)

    def mean(self, name: str) -> float:
        """Returns the loss, or a metric, as a mean over the rows."""
        return self.sums[name] / self.divisor(name)


@dataclass(frozen=True)
class RestartRecord:
    """The steps of a run that was stopped and started again, as this rank counted them.

    stopped_at: done when it was stopped. continued_at: with which it went on. done: at its end. saved_at: of its last
    checkpoint, which rank 0 reads; None: of the others.
    """

    stopped_at: int
    continued_at: int
    done: int
    saved_at: int | None = None


@dataclass(frozen=True)
class TensorRecord:
    """Sums over one rank's piece of a tensor, by which two states are compared; those of all pieces are the tensor's.

    size: the elements of the piece. whole: of the tensor. magnitude: the sum of the absolute values. mixed: of the
    values, each times a weight that its place in the tensor decides.
    """

    size: int
    whole: int
    magnitude: float
    mixed: float


@dataclass(frozen=True)
class TrainingRecord:
    """What one rank observed in one training.

    losses, step_of, weight_of: the mean loss, step and weight of each micro-batch. step_s, wait_s: the seconds of each
    step, and how many of them it waited for data. busy_s: CPU seconds of each step in the thread that trains, without
    loading. fetch_s, fetch_cpu_s: wall-clock and CPU seconds of all loading.
    began_at: when the first batch was requested, Unix time in seconds. start_digests: of the first weights
    and buffers, in the order of the state dict.
    Only for the proof: micro_batches: each one; later: epoch -> the rows of its first step; rates: the learning rates
    of each optimizer step and parameter group; end_digests: of each parameter, and part of one, that other ranks hold,
    too, after the last step; divided: parameter -> axis of the mesh along which ranks have other parts of it, or others
    -> this rank's place there; state: of an interrupted one, at the interruption or after loading; restart: of `life`.
    curve: the evaluations, each {step, loss, …}. best_at: the index of the best one, -1: none. stopped: 'early' by
    patience, or 'requested' by a graceful stop. resumed_from: the steps that were done before, in an earlier launch.
    changes: what differed when it was continued on other data (--resume-changed-data). spot_checks: the steps that were
    replayed, on rank 0, those of earlier launches too. cost: of a step; None: nobody has looked.
    """

    losses: list[float] = field(default_factory=list)
    step_of: list[int] = field(default_factory=list)
    weight_of: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    wait_s: list[float] = field(default_factory=list)
    busy_s: list[float] = field(default_factory=list)
    fetch_s: float = 0.0
    fetch_cpu_s: float = 0.0
    began_at: float | None = None
    start_digests: list[str] = field(default_factory=list)
    autocast: bool = False
    micro_batches: list[MicroBatchRecord] = field(default_factory=list)
    later: Mapping[int, list[int]] = field(default_factory=dict)
    rates: list[list[float]] = field(default_factory=list)
    end_digests: Mapping[str, int] = field(default_factory=dict)
    divided: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    skipped_steps: int = 0
    peak_memory_bytes: int | None = None
    evaluation: EvaluationRecord | None = None
    asked_steps: int | None = None
    stopped: str | None = None
    curve: list[dict[str, float]] = field(default_factory=list)
    best_at: int = -1
    resumed_from: int = 0
    state: Mapping[str, TensorRecord] = field(default_factory=dict)
    changes: tuple[str, ...] = ()
    spot_checks: tuple[SpotCheck, ...] = ()
    restart: RestartRecord | None = None
    cost: StepCost | None = None


@dataclass(frozen=True)
class Moved:
    """How far a training moves a tensor. distance: the greatest. largest_before: its greatest finite magnitude at the
    start."""

    distance: float
    largest_before: float


@dataclass(frozen=True)
class ReferenceLifeRecord:
    """The evaluations, checkpoints and restart of a run of the reference.

    every: steps between two evaluations. stop: steps before the restart. steps: in all. checkpoint_every: steps between
    two checkpoints. evaluations: each one, at_step: the steps before it. before: of the weights that it begins with.
    best_at: the index of the best evaluation; -1: none. options: what the run is asked for. own_losses: of the first
    step from the model's own weights, [replica][micro-batch]. parameters: their names, of tied ones the first.
    distances: of a run with noise, kind of tensors -> tensor -> how far it is from that of the run as it is.
    """

    every: int
    stop: int
    steps: int
    at_step: list[int]
    evaluations: list[EvaluationRecord]
    before: EvaluationRecord | None
    best_at: int
    options: LifeOptions
    parameters: list[str]
    own_losses: list[list[float]] = field(default_factory=list)
    checkpoint_every: int = 0
    distances: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class ReferenceTrainingRecord:
    """One training of the reference.

    micro_batches: [replica][micro-batch]. later: epoch -> [micro-batch][replica] -> the rows of its first step. rates:
    learning rates, [step][group]. norms: each step's gradient norm. draws: whether the model draws random numbers.
    parameters: their names. length: rows of the subset. clip_norm: the job's. each_once: whether an epoch
    has every row once, which an order of the job's own need not. phases: how many steps each batch is trained for.
    schedule: of each step its number in the whole schedule, which 'late' does not begin with 0.
    distances: of a training with noise, tensor -> the greatest distance of its final values from those of the training
    as it is. moved: of the training as it is, for each tensor. life: of the training of that name.
    """

    micro_batches: list[list[MicroBatchRecord]]
    later: Mapping[int, list[list[list[int]]]]
    rates: list[list[float]]
    norms: list[float]
    draws: bool
    start_digests: list[str]
    parameters: list[str]
    length: int
    clip_norm: float | None = None
    evaluation: EvaluationRecord | None = None
    each_once: bool = True
    distances: Mapping[str, float] = field(default_factory=dict)
    moved: Mapping[str, Moved] = field(default_factory=dict)
    phases: int = 1
    life: ReferenceLifeRecord | None = None
    schedule: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class SeparationRecord:
    """The losses of a few rows in batches of different rows: see reference/separation.py.

    weights: of each row. whole: of all rows; again: the same, by the model that has just computed it. alone: of each
    row. pairs: of row `paired`, the first that weighs something, with each other one. halves: of the first and the
    second half of the rows. output_gap: how far a row's output depends on the other rows, relative; None where it
    cannot be compared. padded: whether it is padding alone that it depends on: the outputs of rows that are padded
    differ, and of the others none does. gradient_gap: how far the gradient of a step's rows is from the mean of its
    halves', relative, where the losses are such means; None where they are not, or it cannot be computed.
    moved: buffers and attributes that a forward pass changes. unknown: random operations whose numbers are not held.
    collate_draws: whether the job's collate draws random numbers.
    """

    weights: list[float]
    whole: float
    again: float
    alone: list[float]
    paired: int
    pairs: list[float]
    halves: list[float]
    output_gap: float | None
    moved: list[str]
    unknown: list[str]
    collate_draws: bool
    padded: bool = False
    gradient_gap: float | None = None


@dataclass(frozen=True)
class FromOne:
    """How far a parameter or buffer is from plain training's after 'sgd'. distance: the greatest. largest: its greatest
    finite magnitude."""

    distance: float
    largest: float


@dataclass(frozen=True)
class ReferenceLayoutRecord:
    """The reference's trainings for one layout.

    trainings: name -> [the training as it is, and twice with noise in its rounding]. dtype: of these. float64_failed:
    why it is not float64. sgd_lr: the learning rate of 'sgd'. sgd_lr_usual: the one that is tried first.
    files: the number in the names of its files, which layouts that train alike share. from_one: parameter or buffer ->
    its distance from plain training's, where that was played too.
    then: the layout with which it continues after its interruption.
    not_played: name of a training, or OWN_DTYPE for all in the job's own dtype -> why it could not be played.
    counts: the buffers of whole numbers. scales: whether gradients follow the loss, so that the noise scales losses.
    written: the parameters that a forward pass sets to values of its rows. rounds: as of engine.Numerics.
    asks_rank: the places at which the job asks which rank it is.
    Only of a layout with held random numbers and without batch statistics: separation, and whether the job asked for
    random numbers (keyed: and each row kept its own), batch statistics, or only their averages (running_statistics).
    """

    layout: Layout
    dtype: str
    float64_failed: str | None
    rounds_to: str | None
    exact_steps: int
    clip_norm: float | None
    sgd_lr: float
    sgd_lr_usual: float
    trainings: Mapping[str, list[ReferenceTrainingRecord]]
    files: int = 0
    from_one: Mapping[str, FromOne] = field(default_factory=dict)
    separation: SeparationRecord | None = None
    draws: bool = False
    batch_statistics: bool = False
    keyed: bool = False
    running_statistics: bool = False
    counts: tuple[str, ...] = ()
    scales: bool = True
    written: tuple[str, ...] = ()
    then: Layout | None = None
    not_played: Mapping[str, str] = field(default_factory=dict)
    rounds: Literal["passes", "sums", "all"] = "all"
    asks_rank: tuple[str, ...] = ()


@dataclass(frozen=True)
class RankRecord:
    """What one rank wrote. started_at: of the launch, Unix time in seconds. layouts: of the reference. trials: of the
    reference, with candidate faults. collectives: what each rank observed, in rank order; rank 0 writes it."""

    rank: int
    world: World
    threads: int
    started_at: float
    machine: MachineFacts
    trainings: Mapping[str, TrainingRecord] = field(default_factory=dict)
    layouts: list[ReferenceLayoutRecord] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)
    collectives: list[CollectiveRank] = field(default_factory=list)


FAULT = "samestep_has_failed"  # the message of an exception of samestep's own


@dataclass(frozen=True)
class RankError:
    """Why a rank failed. lost_peer: whether it only reports that another rank is lost. time: Unix time in seconds."""

    rank: int
    kind: Literal["user", "refused", "crash"]
    message: Message
    time: float
    traceback: str
    lost_peer: bool


@dataclass(frozen=True)
class Progress:
    """What a launch is doing.

    attempt: how often the launcher has restarted it. ranks: how many there are; 0: not known yet. done: steps, None
    before the training. samples: in these steps. loss: a recent one. curve: the evaluations so far. resumed_from: the
    steps that an earlier launch has done.
    """

    activity: str = "starting"
    attempt: int = 0
    done: int | None = None
    steps: int = 0
    samples: int = 0
    loss: float = 0.0
    curve: list[dict[str, float]] = field(default_factory=list)
    resumed_from: int = 0
    ranks: int = 0


def write_progress(rank: int, folder: Path, progress: Progress) -> None:
    """Writes progress.json, on rank 0 only. A disk that takes no file ends no training: the command looks for that."""
    if rank == 0:
        with suppress(OSError):
            write(folder / PROGRESS, progress)


def attempt() -> int:
    """Returns how often the launcher has restarted these ranks."""
    text = os.environ.get(ATTEMPT) or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return int(text) if text.isdecimal() else 0  # a variable that is left over in a shell may hold anything


def read_progress(folder: Path, before: Progress = Progress()) -> Progress:
    """Reads the launch's latest progress. before: what is returned where there is none, as in a removed folder."""
    try:
        return read(Progress, folder / PROGRESS)
    except OSError:
        return before


def rank_files(folder: Path) -> list[Path]:
    """Returns the ranks' records in a folder, in rank order: rank0.json, rank1.json, …, and no file of a like name."""
    named = [re.fullmatch(r"rank(0|[1-9][0-9]{0,8})\.json", path.name) for path in paths_in(folder, "rank*.json")]
    return [folder / f"rank{number}.json" for number in sorted(int(name[1]) for name in named if name)]


@dataclass(frozen=True)
class Record:
    """The folder of one launch. ranks: the ranks' records, in rank order; empty before the ranks have ended."""

    folder: Path

    @cached_property
    def ranks(self) -> list[RankRecord]:
        return [read(RankRecord, file) for file in rank_files(self.folder)]

    def plan(self) -> Plan:
        """Reads the launch's plan."""
        return read(Plan, self.folder / "plan.json")

    def written(self) -> set[int]:
        """Returns the ranks that have written a record."""
        return {int(path.stem.removeprefix("rank")) for path in rank_files(self.folder)}

    def complete(self, size: int) -> bool:
        """Returns whether all `size` ranks have written a record of this schema."""
        files = rank_files(self.folder)
        return len(files) == size and all(map(is_current, files))

    def error(self) -> RankError | None:
        """Returns the first error, or None. An error that only reports a lost rank comes after all others."""
        errors = list[RankError]()
        for file in paths_in(self.folder, "error-rank*.json"):
            with suppress(FileNotFoundError):  # somebody has removed it meanwhile
                errors.append(read(RankError, file))
        return min(errors, key=lambda error: (error.lost_peer, error.time), default=None)

    def folder_of(self, name: str) -> Path:
        """Returns the folder of the launch that ended a training."""
        return self.folder

    def training(self, name: str) -> list[TrainingRecord]:
        """Returns what each rank observed in one training."""
        return [rank.trainings[name] for rank in self.ranks]

    def arrays(self, name: str, rank: int = 0) -> dict[str, NDArray[Any]]:
        """Returns the tensors that `rank` wrote under `name`. Raises TrainingFailed for a file that cannot be read."""
        return read_arrays(self.folder, rank, name)
