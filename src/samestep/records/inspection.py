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
    """What the parent asks a worker about a job and about the engines."""

    job: str | None = None
    """The job's name or path; None: the question is about the engines alone."""

    settings: Mapping[str, str] = field(default_factory=dict)
    """The job's settings as --set gives them: name -> text."""

    device: str = "auto"
    """The device as --device gives it: 'auto', 'cpu', 'cuda', or a list such as 'cuda:0,cuda:1'."""

    replicas: int | None = None
    """The number of replicas on each machine; None: one for each GPU, or 2 on a CPU."""

    machines: int = 1
    """The number of machines."""

    least: int = 0
    """The fewest machines that the training can continue with, where machines may leave; 0: all machines stay."""

    steps: int | None = None
    """The optimizer steps of a training of the proof, whose subset of rows is inspected too; None: as many as the job
    needs."""

    engines: tuple[str, ...] = ()
    """The names of the engines of the command; empty: all engines."""

    engine_settings: Mapping[str, str] = field(default_factory=dict)
    """The engines' settings as --set-engine gives them: name -> text. The worker raises UserError where no engine has
    one."""

    also: int | None = 0
    """The second number of ranks for which the engines are proven; None: the worker chooses it; 0: there is none."""

    proves: bool = False
    """Whether the job will be proven; only then are its rows searched for unusual ones."""

    mesh: Mesh | None = None
    """The mesh that --mesh gives; None: --mesh is not given."""

    as_threads: bool = False
    """Whether the ranks are threads of one process, which share GPUs; where `replicas` is None there are 2 or more."""


@dataclass(frozen=True)
class MachineFacts:
    """The machine on which something was measured."""

    python: str
    """The version of Python."""

    torch: str
    """The version of torch."""

    host: str
    """The machine's host name."""

    processor: str
    """The processor's name."""

    cores: int
    """The number of logical processors."""

    gpu: str | None = None
    """The name of the GPU; None: the ranks compute on the CPU."""

    interface: str | None = None
    """The network interface that gloo uses, as GLOO_SOCKET_IFNAME names it; None: gloo chooses it."""


@dataclass(frozen=True)
class EngineFacts:
    """An engine on this machine, with the settings and the number of ranks that the question asks for."""

    name: str
    """The engine's name."""

    available: bool
    """Whether the engine can run on this machine."""

    reason: Message | None = None
    """Why the engine is not available; None: the engine is available."""

    install: str | None = None
    """The command that installs the engine; None: the engine cannot be imported."""

    version: str | None = None
    """The version of the engine's package; None: the package is not installed."""

    purpose: str = ""
    """Six words that describe the engine, for `samestep engines`."""

    process_kind: str = ""
    """The kind of processes that the engine needs, as Needs.processes: 'group', 'one' or a launcher's own kind."""

    preloads: tuple[str, ...] = ()
    """The modules that a fork server imports in advance for the engine's ranks."""

    processes: int = 0
    """The number of processes that the engine needs."""

    devices: tuple[str, ...] = ()
    """The devices of all processes together, such as 'cpu' or 'cuda:0'."""

    settings: Values = field(default_factory=dict)
    """The engine's settings: name -> value."""

    chosen: Values = field(default_factory=dict)
    """The settings that --set-engine has changed from their defaults: name -> value."""

    layout: Layout | None = None
    """How the engine distributes a step with these settings; None: the engine cannot be imported."""

    numerics: Numerics | None = None
    """How the engine rounds with these settings; None: the engine cannot be imported."""

    no_threads: Message | None = None
    """Why the engine's ranks cannot be threads of one process; None: they can."""

    axes: tuple[str, ...] = ()
    """The axes of a mesh along which the engine's ranks can be arranged; empty: the engine has one process."""

    mesh: Mesh | None = None
    """How the engine's ranks are arranged; None: each rank is a replica."""

    no_spot_checks: Message | None = None
    """Why --spot-check does not replay the engine's steps; None: it does."""

    cannot_skip: Message | None = None
    """Why --on-nan skip cannot leave out a step of the engine; None: it can."""

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
    """The second number of ranks for which engines are proven."""

    ranks: int
    """The number of ranks."""

    proof_rows: int
    """The rows of a step of the proof on these ranks, as ProofFacts.rows."""

    varying_calls: Mapping[str, VaryingCalls]
    """Engine -> a module that forward passes call a varying number of times, as Refusals.varying_calls."""

    refused: Message | None = None
    """Why the job cannot be trained on these ranks; None: it can."""

    mesh: Mesh | None = None
    """How the ranks are arranged; None: each rank is a replica."""


@dataclass(frozen=True)
class DataFacts:
    """The training data, and how they are divided into steps and loaded."""

    rows: int
    """The number of rows of the training dataset."""

    global_batch: int
    """The number of rows of an optimizer step, over all replicas."""

    micro_batches: Mapping[int, int]
    """Number of replicas -> micro-batches in a step on each replica."""

    steps_per_epoch: int
    """The number of optimizer steps in an epoch, over all phases."""

    last: str
    """What happens to the incomplete last batch of an epoch: 'keep' or 'drop'."""

    workers: int
    """The number of loader processes that each rank starts; 0: the training process loads the data."""

    most_workers: int
    """The number of loader processes for each rank beyond which loading becomes no faster."""

    prefetch: int
    """The number of batches that each loader process loads in advance."""


@dataclass(frozen=True)
class ModelFacts:
    """The model: its size, and its layers and parameters that engines treat differently."""

    parameters: int
    """The number of elements of all the model's parameters."""

    dtype: str
    """The dtype of the model's first parameter, such as 'float32'."""

    batch_layers: tuple[str, ...]
    """The names of the model's BatchNorm layers."""

    random_layers: tuple[str, ...]
    """The names of the model's dropout layers with a probability above 0."""

    unused: tuple[str, ...]
    """The names of the trainable parameters that a backward pass gives no gradient."""

    scalars: tuple[str, ...]
    """The names of the parameters without dimensions."""

    pretrained: tuple[str, ...]
    """The names of the outermost modules that have a method save_pretrained; '' for the model itself."""

    row_bytes: float
    """The bytes that the forward pass of one row keeps: the outputs of the model's layers."""

    row_s: float
    """The seconds that the forward and backward passes of one row take, roughly."""


@dataclass(frozen=True)
class OptimizerFacts:
    """The optimizer, or the optimizers that take turns."""

    name: str
    """The class name of the optimizer; of several optimizers, the first."""

    phases: Mapping[str, str] = field(default_factory=dict)
    """Phase -> the class name of its optimizer, in the order of their turns; empty: the job has one optimizer."""

    needs_closure: bool = False
    """Whether the optimizer's step demands a closure, as that of LBFGS does."""


@dataclass(frozen=True)
class EvaluationFacts:
    """The evaluation."""

    rows: int = 0
    """The number of rows of the evaluation dataset; 0: the job has no evaluation."""

    metrics: Mapping[str, Literal["min", "max"]] = field(default_factory=dict)
    """Metric -> 'min' or 'max', whichever is better; with 'loss' where an evaluation has one. Empty: no evaluation."""

    draws: tuple[str, ...] = ()
    """What draws random numbers in an evaluation: any of 'dataset', 'collate' and 'model'."""


@dataclass(frozen=True)
class ProofFacts:
    """What the trainings of the proof are."""

    steps: int
    """The number of optimizer steps of a training."""

    rows: int
    """The number of rows of a step, where the whole global batch would take too long; 0: the global batch. It equals
    the global batch where the job takes no other number of rows."""

    costly: bool
    """Whether a step takes long, even with `rows` rows."""

    extremes: tuple[int, ...] = ()
    """The indices of training rows that are unlike others, those that matter most first."""

    rows_looked_at: int = 0
    """The number of training rows that were searched for `extremes`; 0: none, as for a stream."""

    second: SecondSize | None = None
    """The second number of ranks, whose ranks are replicas; None: there is none."""

    second_meshes: Mapping[str, SecondSize] = field(default_factory=dict)
    """Engine -> the second number of ranks of an engine whose ranks are arranged in a mesh."""

    def second_of(self, engine: EngineFacts) -> SecondSize | None:
        """Returns the second number of ranks of an engine; None where there is none."""
        return self.second_meshes.get(engine.name) if engine.mesh else self.second


@dataclass(frozen=True)
class Refusals:
    """What cannot train the job: numbers of replicas, and engines."""

    of_replicas: Mapping[int, Message | None]
    """Number of replicas -> why they cannot train the job; None: they can."""

    undivided: Mapping[str, Message] = field(default_factory=dict)
    """Engine -> why its ranks cannot divide the model."""

    varying_calls: Mapping[str, VaryingCalls] = field(default_factory=dict)
    """Engine -> a module whose parameters the engine's ranks gather at each of its calls, where the number of its calls
    differs from batch to batch."""


@dataclass(frozen=True)
class JobFacts:
    """A job's sizes and properties, and what cannot train it."""

    settings: Mapping[str, str]
    """The job's settings: name -> type and default, as text."""

    chosen: Mapping[str, str]
    """The settings that --set has changed: name -> value, as text."""

    source: str
    """A digest of the job's file and of the modules beside it that it imports."""

    sync_batchnorm: bool
    """Whether BatchNorm's statistics are over all ranks' rows, by torch's SyncBatchNorm."""

    gather_outputs: bool
    """Whether the criterion sees the outputs and the batches of all ranks."""

    carry_state: bool
    """Whether forward returns a state that the next step of the same rows continues from."""

    data: DataFacts
    """The training data."""

    model: ModelFacts
    """The model."""

    optimizer: OptimizerFacts
    """The optimizer, or those of all phases."""

    evaluation: EvaluationFacts
    """The evaluation; that of a job without one has no rows."""

    proof: ProofFacts
    """What the trainings of the proof are."""

    refusals: Refusals
    """What cannot train the job."""

    divided: Mapping[str, Message] = field(default_factory=dict)
    """Engine -> how its ranks divide the model, for the user to read."""


@dataclass(frozen=True)
class Inspection:
    """The answer to a Question."""

    devices: tuple[str, ...]
    """The devices of this machine that the question's `device` names, such as 'cpu' or 'cuda:0'."""

    machine: MachineFacts
    """The machine on which the worker ran."""

    replicas: int
    """The number of replicas on all machines together."""

    engines: tuple[EngineFacts, ...]
    """All engines, also those that are not available."""

    job: JobFacts | None = None
    """The job's facts; None: the question named no job."""

    second_engines: tuple[EngineFacts, ...] = ()
    """The engines on the second number of ranks, or on the second mesh; empty: there is none."""

    parts: tuple[EngineFacts, ...] = ()
    """The engines whose ranks are arranged in a mesh, once for each part of that mesh."""

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
    """What the parent asks a worker for: the script that trains a job on an engine."""

    job: str
    """The job's name or path."""

    settings: Mapping[str, str]
    """The job's settings as --set gives them: name -> text."""

    engine: str
    """The engine's name."""

    engine_settings: Mapping[str, str]
    """The engine's settings as --set-engine gives them: name -> text."""

    size: int
    """The number of ranks that the script's launch line starts."""

    file: str
    """The script's file name, for the launch line in the script."""

    mesh: str = ""
    """How the ranks are arranged, as --mesh takes it; '': as the engine arranges them without --mesh."""


@dataclass(frozen=True)
class Script:
    """The answer to an EjectQuestion."""

    made: Mapping[str, str]
    """File name -> text, of the script and then of its runtime module."""

    copied: Mapping[str, str]
    """Path beside the script -> the file that is copied there unchanged."""

    root: str
    """The folder that holds the copied files; a script that is written into this folder finds them there."""


@dataclass(frozen=True)
class Mistake:
    """The answer where the worker raised a UserError. error: its message."""

    error: Message
