"""The questions that the parent asks a worker before a launch, and the answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from samestep.engine import Layout, Numerics
from samestep.message import Message
from samestep.world.mesh import Mesh

ANSWER, MISTAKE = "answer.json", "mistake.json"  # the file of the answer, or of the Mistake

Values = Mapping[str, Any]  # of settings: an engine's keyword arguments, or a job's


@dataclass(frozen=True)
class Question:
    """Asks about a job and the engines.

    job: its name or path; None: about the engines alone. settings: texts of --set. device: as --device gives it.
    replicas: on each of `machines`; None: one for each GPU, or 2 on a CPU. least: the fewest machines, where some may
    leave; 0: all stay. also: the second number of ranks; None: to be chosen; 0: there is none.
    steps: of the proof, whose subset is inspected too; None: as the job needs. engines: their names; none: all.
    engine_settings: texts of --set-engine, which these engines must have. proves: whether the job is to be proven, so
    that its rows are looked at. mesh: of --mesh; None: none is given. as_threads: ranks share GPUs, and are at least 2.
    """

    job: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    device: str = "auto"
    replicas: int | None = None
    machines: int = 1
    least: int = 0
    steps: int | None = None
    engines: tuple[str, ...] = ()
    engine_settings: Mapping[str, str] = field(default_factory=dict)
    also: int | None = 0
    proves: bool = False
    mesh: Mesh | None = None
    as_threads: bool = False


@dataclass(frozen=True)
class MachineFacts:
    """The machine of a measurement. host: its name. interface: the one that gloo uses, if samestep chose it."""

    python: str
    torch: str
    host: str
    processor: str
    cores: int
    gpu: str | None = None
    interface: str | None = None


@dataclass(frozen=True)
class EngineFacts:
    """An engine on this machine.

    reason: why it is not available. install: the command that installs it. version: of its package. process_kind:
    its PROCESSES. preloads: the modules that a fork server imports for its ranks. processes: how many it needs.
    devices: of all processes. settings: their values. chosen: those that --set-engine has changed. layout,
    numerics: with these settings; None for an engine that cannot be imported. no_threads: why its ranks cannot be
    threads of one process; None: they can. axes: along which its ranks can be arranged. mesh: how they are; None:
    each is a replica. no_spot_checks: why its steps are not replayed by --spot-check; None: they are. cannot_skip:
    why --on-nan skip cannot leave out a step of it; None: it can.
    """

    name: str
    available: bool
    reason: Message | None = None
    install: str | None = None
    version: str | None = None
    purpose: str = ""
    process_kind: str = ""
    preloads: tuple[str, ...] = ()
    processes: int = 0
    devices: tuple[str, ...] = ()
    settings: Values = field(default_factory=dict)
    chosen: Values = field(default_factory=dict)
    layout: Layout | None = None
    numerics: Numerics | None = None
    no_threads: Message | None = None
    axes: tuple[str, ...] = ()
    mesh: Mesh | None = None
    no_spot_checks: Message | None = None
    cannot_skip: Message | None = None

    @property
    def replicas(self) -> int:
        """The number of replicas; 0 for an engine that cannot be imported."""
        return self.layout.replicas if self.layout else 0


@dataclass(frozen=True)
class VaryingCalls:
    """A module of the model that forward passes call a number of times that depends on their `by`."""

    unit: str
    by: Literal["rows", "data"]


@dataclass(frozen=True)
class SecondSize:
    """The second number of ranks for which engines are proven. proof_rows, varying_calls: as of JobFacts. refused: why
    the job cannot be trained on these ranks; None where it can. mesh: how they are arranged; None: each is a replica.
    """

    ranks: int
    proof_rows: int
    varying_calls: Mapping[str, VaryingCalls]
    refused: Message | None = None
    mesh: Mesh | None = None


@dataclass(frozen=True)
class JobFacts:
    """A job's sizes, and what its layers refuse.

    settings: name -> its type and default, as text. chosen: those that --set has changed. source: a digest of its file
    and the modules beside it. rows, evaluation_rows: of its datasets. metrics: name -> 'min' or 'max'. micro_batches:
    replicas -> micro-batches in a step. proof_steps: of a training of the proof. proof_rows: of a step of the proof,
    where the job's whole batch would take too long; else 0. costly: whether a step of the proof still takes long.
    row_bytes, row_s: what a row's forward pass keeps, and the seconds of its forward and backward passes, roughly.
    unused: parameters without a gradient; scalars: those without dimensions. batch_layers, random_layers: the names of
    its BatchNorm and dropout layers. pretrained: of its outermost modules with save_pretrained, '' for
    the model itself. refused: replicas -> why they cannot train it.
    phases: those of a job with several optimizers, in their turn -> the optimizer's class. needs_closure: whether the
    optimizer's step demands one, as LBFGS's does. evaluation_draws: what draws random numbers in an evaluation:
    'dataset', 'collate', 'model'. varying_calls: engine -> a module that its ranks gather at each of its calls, whose
    number differs from batch to batch. second: of the second number of ranks; None where there is none. second_meshes:
    engine -> of its second mesh, where its ranks are arranged in one. extremes:
    training rows that are unlike others, and rows_looked_at: of how many.
    divided: engine -> how its ranks divide the model; undivided: engine -> why they cannot.
    """

    settings: Mapping[str, str]
    chosen: Mapping[str, str]
    source: str
    rows: int
    evaluation_rows: int
    metrics: Mapping[str, Literal["min", "max"]]
    global_batch: int
    micro_batches: Mapping[int, int]
    proof_steps: int
    proof_rows: int
    costly: bool
    row_bytes: float
    row_s: float
    steps_per_epoch: int
    epochs: int
    parameters: int
    dtype: str
    optimizer: str
    workers: int
    most_workers: int
    prefetch: int
    last: str
    sync_batchnorm: bool
    gather_outputs: bool
    carry_state: bool
    batch_layers: tuple[str, ...]
    random_layers: tuple[str, ...]
    unused: tuple[str, ...]
    scalars: tuple[str, ...]
    pretrained: tuple[str, ...]
    refused: Mapping[int, Message | None]
    phases: Mapping[str, str] = field(default_factory=dict)
    needs_closure: bool = False
    evaluation_draws: tuple[str, ...] = ()
    varying_calls: Mapping[str, VaryingCalls] = field(default_factory=dict)
    second: SecondSize | None = None
    second_meshes: Mapping[str, SecondSize] = field(default_factory=dict)
    extremes: tuple[int, ...] = ()
    rows_looked_at: int = 0
    divided: Mapping[str, Message] = field(default_factory=dict)
    undivided: Mapping[str, Message] = field(default_factory=dict)

    def second_of(self, engine: EngineFacts) -> SecondSize | None:
        """Returns the second number of ranks of an engine; None where there is none."""
        return self.second_meshes.get(engine.name) if engine.mesh else self.second


@dataclass(frozen=True)
class Inspection:
    """The answer to a Question. devices: of this machine. replicas: on all machines. second_engines: the engines on the
    second number of ranks. parts: those whose ranks are arranged in a mesh, on each part of it."""

    devices: tuple[str, ...]
    machine: MachineFacts
    replicas: int
    engines: tuple[EngineFacts, ...]
    job: JobFacts | None = None
    second_engines: tuple[EngineFacts, ...] = ()
    parts: tuple[EngineFacts, ...] = ()

    def engine(self, name: str) -> EngineFacts | None:
        return next((facts for facts in self.engines if facts.name == name), None)

    def part(self, name: str, mesh: Mesh) -> EngineFacts | None:
        """Returns an engine's facts on a part of its mesh."""
        return next((facts for facts in self.parts if (facts.name, facts.mesh) == (name, mesh)), None)

    @property
    def the_job(self) -> JobFacts:
        """The job's facts, where the question named one."""
        assert self.job is not None
        return self.job


@dataclass(frozen=True)
class EjectQuestion:
    """Asks for the script of a job on an engine with `size` ranks. file: its name, for the launch line in it.
    mesh: how they are arranged, as --mesh takes it; '': as the engine does without it."""

    job: str
    settings: Mapping[str, str]
    engine: str
    engine_settings: Mapping[str, str]
    size: int
    file: str
    mesh: str = ""


@dataclass(frozen=True)
class Script:
    """The answer to an EjectQuestion.

    made: name -> text, of the script and then of its runtime module. copied: path beside the script -> the file that is
    copied there as it is. root: the folder where the latter are; a script that is written into it finds them there.
    """

    made: Mapping[str, str]
    copied: Mapping[str, str]
    root: str


@dataclass(frozen=True)
class Mistake:
    """The answer where the worker raised a UserError. error: its message."""

    error: Message
