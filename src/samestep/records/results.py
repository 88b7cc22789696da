"""The results of a command: results.json, the output of --json, and what the Python API returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from samestep.message import Message
from samestep.records.collectives import CollectiveResults
from samestep.records.costs import StepCost
from samestep.records.files import finite, read, with_schema, write_json
from samestep.records.inspection import MachineFacts, Values
from samestep.records.monitor import MonitorSummary
from samestep.records.origin import Origin
from samestep.records.spot_check import SpotCheck
from samestep.records.trial import Trial
from samestep.world.mesh import parse_mesh

RESULTS = "results.json"
VerdictWord = Literal["same", "approximate", "differs", "failed", "refused", "unavailable"]
PROVEN: tuple[VerdictWord, ...] = ("same", "approximate")  # the verdicts with which an engine is measured


@dataclass(frozen=True)
class Divergence:
    """The first difference between two trainings. training: of the proof. step: counted from 0 in this training.

    expected: the reference's value. found: the engine's. Both are short enough to show, and never None. ranks: the
    second number of ranks, where it is this one that differs. epoch, schedule_step: of the step in the whole schedule,
    where the training does not begin with step 0. name: of the training in the engine's record. tried: the candidate
    faults with which the reference has replayed it. times_bound: how far it is off, as a multiple of what rounding
    explains; None where nothing is explained by rounding.
    """

    training: str
    step: int | None
    quantity: str
    tensor: str | None
    rank: int | None
    expected: Any
    found: Any
    cause: Message | None = None
    ranks: int | None = None
    epoch: int | None = None
    schedule_step: int | None = None
    name: str = ""
    tried: tuple[Trial, ...] = ()
    times_bound: float | None = None

    @property
    def order(self) -> int:
        """The step, by which divergences are sorted: what is of no step comes before all."""
        return -1 if self.step is None else self.step


@dataclass(frozen=True)
class Inexactness:
    """How far an engine that is inexact by design is from the exact training after the proof's steps in float32.

    distance, bound: of the weight that is furthest off. loss_gap: of the last step, relative. skipped_steps: after an
    overflow.
    """

    distance: float | None
    bound: float | None
    loss_gap: float | None
    skipped_steps: int


@dataclass(frozen=True)
class Verdict:
    """Whether an engine takes the same training steps as the reference, and the first divergence where it does not.

    bitwise: every weight, to the last bit.
    max_difference: the greatest difference of any weight or buffer at the end; bound: what was allowed for it.
    origin: where what is wrong arises, of an engine whose ranks are arranged in a mesh.
    """

    verdict: VerdictWord
    bitwise: bool = False
    max_difference: float | None = None
    bound: float | None = None
    first_divergence: Divergence | None = None
    reason: Message | None = None
    notes: tuple[Message, ...] = ()
    numerics: Inexactness | None = None
    origin: Origin | None = None

    @property
    def proven(self) -> bool:
        return self.verdict in PROVEN


@dataclass(frozen=True)
class Summary:
    """A median over n launches, with its 95 % interval."""

    median: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class StepTime:
    """Milliseconds of a step, and of its wait for data: medians over all measured steps. compute: in which the thread
    that trains was on a processor; None on a GPU, to which it hands out work."""

    wait: float
    step: float
    compute: float | None = None


@dataclass(frozen=True)
class Launch:
    """One launch's figures, warm-up left out. losses: the global batch's mean at every step, warm-up included."""

    repeat: int
    samples_per_second: float
    step_ms: list[float]
    wait_ms: list[float]
    losses: list[float]
    peak_memory_mib: float = 0.0
    startup_s: float = 0.0
    compute_ms: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Measurement:
    """What a proven engine's launches measured; None where nothing was. ratio: samples/s over those of one process, in
    the same round.

    efficiency: the ratio divided by the replicas. peak_memory_mib: of the rank that needs most. startup_s: until the
    first batch. monitor: what the latest launch used, from start to end; None where that was not sampled. costs: what a
    step costs each rank, in their order; none where nobody has looked.
    """

    samples_per_second: Summary | None = None
    ratio: Summary | None = None
    efficiency: Summary | None = None
    step_ms: StepTime | None = None
    peak_memory_mib: float | None = None
    startup_s: float | None = None
    launches: list[Launch] = field(default_factory=list)
    monitor: MonitorSummary | None = None
    costs: list[StepCost] = field(default_factory=list)


MEASURED = tuple(measured.name for measured in fields(Measurement))


@dataclass(frozen=True)
class ContinuedBy:
    """The engine, and the number of replicas, that has continued an interrupted training."""

    engine: str
    replicas: int


@dataclass(frozen=True)
class SecondProof:
    """What the proof on the second number of ranks has found, whose bound and difference are as of Verdict.

    ranks_as: 'threads' of one process, or 'processes'. reason: why nothing was proven. mesh: how they are arranged, as
    of EngineResult.
    """

    ranks: int
    ranks_as: Literal["threads", "processes"]
    verdict: VerdictWord
    bitwise: bool = False
    max_difference: float | None = None
    bound: float | None = None
    reason: Message | None = None
    mesh: str = ""


@dataclass(frozen=True)
class EngineResult(Measurement, Verdict):
    """A row of the table: an engine under a launcher, its verdict, and what was measured.

    settings: those that --set-engine has changed. replicas: None for an engine that cannot be imported. install: the
    command that installs an engine that is missing; else None. continued_by: who has continued its trainings, where the
    proof interrupted them; else None. second: on the second number of ranks; None where none was asked for, and where
    the first one says enough: it is one process, or not proven. mesh: how its ranks are arranged, as 'data=2,tensor=2';
    '': each is a replica.
    """

    engine: str = ""
    launcher: str = ""
    settings: Values = field(default_factory=dict)
    replicas: int | None = None
    install: str | None = None
    continued_by: ContinuedBy | None = None
    second: SecondProof | None = None
    mesh: str = ""

    @property
    def ranks(self) -> int | None:
        """The number of ranks, of which several may share a replica."""
        mesh = parse_mesh(self.mesh)
        return mesh.size if mesh else self.replicas

    def with_verdict(self, verdict: Verdict) -> EngineResult:
        """Returns the row with what the proof has found."""
        return replace(
            self,
            verdict=verdict.verdict,
            bitwise=verdict.bitwise,
            max_difference=verdict.max_difference,
            bound=verdict.bound,
            first_divergence=verdict.first_divergence,
            reason=verdict.reason,
            notes=verdict.notes,
            numerics=verdict.numerics,
            origin=verdict.origin,
        )

    def with_measurement(self, measurement: Measurement) -> EngineResult:
        """Returns the row with what its launches have measured."""
        return replace(
            self,
            samples_per_second=measurement.samples_per_second,
            ratio=measurement.ratio,
            efficiency=measurement.efficiency,
            step_ms=measurement.step_ms,
            peak_memory_mib=measurement.peak_memory_mib,
            startup_s=measurement.startup_s,
            launches=measurement.launches,
            monitor=measurement.monitor,
            costs=measurement.costs,
        )


@dataclass(frozen=True)
class Proof:
    """How it was proven. steps: optimizer steps of each training. float64_failed: why dtype is not float64. rows: of
    each step; fewer than the job's where a step of the whole batch would take too long. quick: whether it had the first
    gradient and SGD's steps alone, as it has on the second number of ranks, over second_steps. rows_looked_at: how many
    of the job's rows were looked at for those that are unlike others; 0: none, as of a stream."""

    steps: int
    dtype: str
    float64_failed: str | None = None
    rows: int = 0
    quick: bool = False
    second_steps: int = 0
    rows_looked_at: int = 0


@dataclass(frozen=True)
class OneProcess:
    """Whether N ranks train the job as one process does.

    answer: 'yes'; 'no, as expected', where layers of the job such as dropout and BatchNorm make N ranks differ; 'no', a
    mistake in the job; or 'not known', where a mistake could hide behind random numbers, or nothing could be compared.
    max_difference: of any weight at the end. reason: why not. advice: what helps. compared: how many of the `tensors`
    were compared; of the others rounding alone hides a difference. steps: of the training after which they were.
    """

    answer: Literal["yes", "no, as expected", "no", "not known"]
    max_difference: float
    reason: Message | None = None
    advice: Message | None = None
    compared: int = 0
    tensors: int = 0
    steps: int = 0

    @property
    def same(self) -> bool:
        return self.answer == "yes"


@dataclass(frozen=True)
class CompareResults:
    """The results of verify or compare.

    package: a digest of samestep's files. tensors: of the model's state; None where nothing was proven. repeats:
    launches of each engine; None without a measurement.
    """

    samestep: str
    package: str
    job: str
    settings: Mapping[str, str]
    world_size: int
    global_batch: int
    rows: int
    device: str
    machine: MachineFacts
    threads_per_rank: int
    workers: int
    dtype: str
    started: str
    proof: Proof
    engines: list[EngineResult]
    same_as_one_process: OneProcess | None = None
    tensors: int | None = None
    repeats: int | None = None
    warmup_steps: int | None = None
    measured_steps: int | None = None
    command: str = ""
    report: str = ""

    @property
    def measured(self) -> bool:
        """Whether speed was measured, as compare does."""
        return self.repeats is not None


@dataclass(frozen=True)
class InitialWeights:
    """The file that a training started from."""

    file: str
    sha256: str


@dataclass(frozen=True)
class RunResults:
    """The results of a training.

    steps: that have been taken; the first `resumed_from` of them by an earlier launch. seconds: of the others.
    curve: the evaluations, each {step, loss, …}. weights: their file. export: the folder for from_pretrained, where one
    was asked for. weights_of_step: the step after which they were
    saved. evaluation: of these weights. stopped: 'requested' or 'early'. wait_share: share of
    the time that it waited for data. loader_ceiling, demand: rows/s that loading and training could reach. traces: the
    files of --profile. monitor: the page of what it used. changes: what differed when it was continued on other
    data (--resume-changed-data), with the step. spot_checks: the steps that were replayed in one process.
    """

    job: str
    settings: Mapping[str, str]
    launcher: str
    world_size: int
    threads_per_rank: int
    engine: str
    engine_settings: Values
    global_batch: int
    init: InitialWeights | None
    steps: int
    asked_steps: int
    resumed_from: int
    stopped: str | None
    seconds: float
    skipped_steps: int
    final_loss: float | None
    curve: list[dict[str, float]]
    weights_of_step: int | None
    evaluation: Mapping[str, float] | None
    evaluation_rows: int
    weights: str
    export: str | None
    wait_share: float | None
    loader_ceiling: float | None
    demand: float | None
    advice: Message | None
    traces: tuple[str, ...] = ()
    monitor: str | None = None
    changes: tuple[str, ...] = ()
    spot_checks: tuple[SpotCheck, ...] = ()


@dataclass(frozen=True)
class EvaluateResults:
    """The evaluation of the weights in a file. sha256: of the file. predictions: the file with the model's outputs."""

    job: str
    settings: Mapping[str, str]
    launcher: str
    world_size: int
    weights: str
    sha256: str
    evaluation: Mapping[str, float]
    evaluation_rows: int
    predictions: str | None


Results = CompareResults | RunResults | EvaluateResults | CollectiveResults
R = TypeVar("R", bound=Results)


def results_json(results: Results) -> Any:
    """Returns results as plain values that JSON knows; those of a proof alone have none of the measurement's fields."""
    values = finite(with_schema(results))
    if isinstance(results, CompareResults) and not results.measured:
        for name in ("repeats", "warmup_steps", "measured_steps"):
            del values[name]
        for row in values["engines"]:
            for name in MEASURED:
                del row[name]
    return values


def write_results(results: Results, folder: Path) -> None:
    """Writes results.json into `folder`."""
    write_json(folder / RESULTS, results_json(results))


def read_results(kind: type[R], folder: Path) -> R:
    """Reads the results.json of a folder. Raises UserError for a file of another schema, or one that is not JSON."""
    return read(kind, folder / RESULTS)
