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
from samestep.records.run_results import EvaluateResults, RunResults
from samestep.records.trial import Trial
from samestep.world.mesh import parse_mesh

RESULTS = "results.json"
VerdictWord = Literal["same", "approximate", "differs", "failed", "refused", "unavailable"]
PROVEN: tuple[VerdictWord, ...] = ("same", "approximate")  # the verdicts with which an engine is measured


@dataclass(frozen=True)
class Divergence:
    """The first difference between two trainings."""

    training: str
    """The training of the proof, one of records.plan.TRAININGS; 'script' for a script's."""

    step: int | None
    """The step, counted from 0 in this training; None: the quantity belongs to no step."""

    quantity: str
    """What differs, such as 'loss', 'first gradient' or 'parameter'."""

    tensor: str | None
    """The name of the tensor that differs; None: no single tensor."""

    rank: int | None
    """The rank on which it differs; None: no single rank."""

    expected: Any
    """The reference's value, short enough to show; never None."""

    found: Any
    """The engine's value, short enough to show; never None."""

    cause: Message | None = None
    """The probable cause; None: unknown."""

    ranks: int | None = None
    """The second number of ranks, where the difference was found on it; None: it was found on the first."""

    epoch: int | None = None
    """The step's epoch in the whole schedule; None: the training begins with step 0."""

    schedule_step: int | None = None
    """The step's number in the whole schedule; None: the training begins with step 0."""

    name: str = ""
    """The training's name in the engine's record."""

    tried: tuple[Trial, ...] = ()
    """The candidate faults with which the reference has replayed the difference."""

    times_bound: float | None = None
    """The difference as a multiple of what rounding explains; None: rounding explains no difference here."""

    @property
    def order(self) -> int:
        """The step, by which divergences are sorted: what is of no step comes before all."""
        return -1 if self.step is None else self.step


@dataclass(frozen=True)
class Inexactness:
    """How far an engine that is inexact by design is from the exact training after the proof's steps in float32."""

    distance: float | None
    """The distance of the weight that is furthest off; None: nothing was compared, or it is not finite."""

    bound: float | None
    """The distance that rounding explains for this weight; None: no bound applies."""

    loss_gap: float | None
    """The difference of the last step's loss, relative to the exact one; None: the exact one is 0, or the gap is not
    finite."""

    skipped_steps: int
    """The number of steps skipped after an overflow."""


@dataclass(frozen=True)
class Verdict:
    """Whether an engine takes the same training steps as the reference, and the first divergence where it does not."""

    verdict: VerdictWord
    """The verdict in a word."""

    bitwise: bool = False
    """Whether every weight is the same to the last bit."""

    max_difference: float | None = None
    """The greatest difference of any weight or buffer at the end; None: nothing was compared, or it is not finite."""

    bound: float | None = None
    """The difference that was allowed for this weight or buffer; None: nothing was compared."""

    first_divergence: Divergence | None = None
    """The first difference; None: there is none."""

    reason: Message | None = None
    """Why the engine was not proven; None: it was, or `first_divergence` says why."""

    notes: tuple[Message, ...] = ()
    """Remarks that restrict or explain the verdict."""

    numerics: Inexactness | None = None
    """How far an engine that is inexact by design is off; None: the engine is exact, or was not proven."""

    origin: Origin | None = None
    """Where the mistake arises, of an engine whose ranks are arranged in a mesh; None: unknown, or no mistake."""

    @property
    def proven(self) -> bool:
        return self.verdict in PROVEN


@dataclass(frozen=True)
class Summary:
    """A median over several launches, with its 95 % interval."""

    median: float
    """The median."""

    low: float
    """The lower end of the interval."""

    high: float
    """The upper end of the interval."""

    n: int
    """The number of launches."""


@dataclass(frozen=True)
class StepTime:
    """The milliseconds of a step: medians over all measured steps."""

    wait: float
    """The milliseconds that a step waits for data."""

    step: float
    """The milliseconds of a whole step."""

    compute: float | None = None
    """The milliseconds in which the thread that trains is on a processor; None: on a GPU, to which that thread hands
    out work."""


@dataclass(frozen=True)
class Launch:
    """The figures of one launch, without its warm-up."""

    repeat: int
    """The number of the launch among the engine's launches, counted from 0."""

    samples_per_second: float
    """The rows per second over all ranks."""

    step_ms: list[float]
    """[step] The milliseconds of the step."""

    wait_ms: list[float]
    """[step] The milliseconds that the step waited for data."""

    losses: list[float]
    """[step] The mean loss of the global batch, with the warm-up's steps."""

    peak_memory_mib: float = 0.0
    """The most memory that a rank used, in MiB."""

    startup_s: float = 0.0
    """The seconds from the launch's start to the first batch."""

    compute_ms: list[float] = field(default_factory=list)
    """[step] The CPU milliseconds of the thread that trains; empty on a GPU."""


@dataclass(frozen=True)
class Measurement:
    """What a proven engine's launches measured; each field is None, or empty, where nothing was measured."""

    samples_per_second: Summary | None = None
    """The rows per second over all ranks."""

    ratio: Summary | None = None
    """The rows per second divided by those of one process in the same round; None without a launch of one process."""

    efficiency: Summary | None = None
    """The ratio divided by the number of replicas."""

    step_ms: StepTime | None = None
    """The milliseconds of a step."""

    peak_memory_mib: float | None = None
    """The memory of the rank that needs most, in MiB."""

    startup_s: float | None = None
    """The seconds from a launch's start to its first batch, as a median."""

    launches: list[Launch] = field(default_factory=list)
    """The figures of each launch."""

    monitor: MonitorSummary | None = None
    """What the latest launch used from its start to its end; None: not sampled."""

    costs: list[StepCost] = field(default_factory=list)
    """What a step costs each rank, in rank order; empty: not measured."""


MEASURED = tuple(measured.name for measured in fields(Measurement))


@dataclass(frozen=True)
class ContinuedBy:
    """The engine, and the number of replicas, that has continued an interrupted training."""

    engine: str
    replicas: int


@dataclass(frozen=True)
class SecondProof:
    """What the proof on the second number of ranks found."""

    ranks: int
    """The number of ranks."""

    ranks_as: Literal["threads", "processes"]
    """Whether the ranks were 'threads' of one process, or 'processes'."""

    verdict: VerdictWord
    """The verdict in a word."""

    bitwise: bool = False
    """Whether every weight is the same to the last bit."""

    max_difference: float | None = None
    """The greatest difference of any weight or buffer at the end, as Verdict.max_difference."""

    bound: float | None = None
    """The difference that was allowed for this weight or buffer, as Verdict.bound."""

    reason: Message | None = None
    """Why nothing was proven; None: it was."""

    mesh: str = ""
    """How the ranks are arranged, such as 'data=2,tensor=2'; '': each rank is a replica."""


@dataclass(frozen=True)
class EngineResult(Measurement, Verdict):
    """A row of the table: an engine under a launcher, its verdict, and what was measured."""

    engine: str = ""
    """The engine's name."""

    launcher: str = ""
    """The launcher's name; '-': no launcher starts the engine."""

    settings: Values = field(default_factory=dict)
    """The settings that --set-engine has changed from their defaults: name -> value."""

    replicas: int | None = None
    """The number of replicas; None: the engine cannot be imported."""

    install: str | None = None
    """The command that installs the engine; None: the engine is not missing."""

    continued_by: ContinuedBy | None = None
    """What has continued the engine's trainings, where the proof interrupted them; None: it did not."""

    second: SecondProof | None = None
    """What the proof on the second number of ranks found; None: none was asked for, or the first number says enough,
    since the engine is one process, or is not proven."""

    mesh: str = ""
    """How the ranks are arranged, such as 'data=2,tensor=2'; '': each rank is a replica."""

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
    """How the engines were proven."""

    steps: int
    """The number of optimizer steps of each training."""

    dtype: str
    """The dtype of the trainings."""

    float64_failed: str | None = None
    """Why `dtype` is not float64; None: it is."""

    rows: int = 0
    """The number of rows of each step: the global batch, or fewer where a step of it would take too long."""

    quick: bool = False
    """Whether the proof had the first gradient and the steps of SGD alone, as on the second number of ranks."""

    second_steps: int = 0
    """The number of optimizer steps on the second number of ranks; 0: there is none."""

    rows_looked_at: int = 0
    """The number of the job's rows that were searched for rows unlike others; 0: none, as for a stream."""


@dataclass(frozen=True)
class OneProcess:
    """Whether N ranks train the job as one process does."""

    answer: Literal["yes", "no, as expected", "no", "not known"]
    """'yes'; 'no, as expected': layers such as dropout and BatchNorm make N ranks differ; 'no': the job has a mistake;
    'not known': random numbers could hide a mistake, or nothing could be compared."""

    max_difference: float
    """The greatest difference of any weight or buffer at the end."""

    reason: Message | None = None
    """Why the answer is not 'yes'; None: it is."""

    advice: Message | None = None
    """What helps; None: nothing to do."""

    compared: int = 0
    """The number of tensors that were compared; in the others, rounding alone could hide a difference."""

    tensors: int = 0
    """The number of tensors that N ranks and one process have."""

    steps: int = 0
    """The number of optimizer steps after which the tensors were compared."""

    @property
    def same(self) -> bool:
        return self.answer == "yes"


@dataclass(frozen=True)
class CompareResults:
    """The results of verify or compare."""

    samestep: str
    """The version of samestep."""

    package: str
    """A digest of samestep's own files."""

    job: str
    """The job's name or path."""

    settings: Mapping[str, str]
    """The job's settings as --set gives them, without secrets: name -> text."""

    world_size: int
    """The number of ranks over all machines."""

    global_batch: int
    """The number of rows of an optimizer step, over all ranks."""

    rows: int
    """The number of rows of the training dataset."""

    device: str
    """The first device, such as 'cpu' or 'cuda:0'."""

    machine: MachineFacts
    """The machine on which the command ran."""

    threads_per_rank: int
    """The number of threads of each rank."""

    workers: int
    """The number of loader processes of each rank."""

    dtype: str
    """The dtype of the model's parameters, such as 'float32'."""

    started: str
    """When the command started, in ISO 8601."""

    proof: Proof
    """How the engines were proven."""

    engines: list[EngineResult]
    """The rows of the table."""

    same_as_one_process: OneProcess | None = None
    """Whether N ranks train the job as one process does; None: not looked at."""

    tensors: int | None = None
    """The number of tensors of the model's state; None: nothing was proven."""

    repeats: int | None = None
    """The number of launches of each engine; None: nothing was measured."""

    warmup_steps: int | None = None
    """The number of first steps of a launch that are discarded; None: nothing was measured."""

    measured_steps: int | None = None
    """The number of steps of a launch that count; None: nothing was measured."""

    command: str = ""
    """The command line as it was typed."""

    report: str = ""
    """The path of report.html, relative to the folder in which the command ran."""

    @property
    def measured(self) -> bool:
        """Whether speed was measured, as compare does."""
        return self.repeats is not None


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
