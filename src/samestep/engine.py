"""Engine: what an engine declares. It is one module in engines/; its function `train` holds the whole training loop."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from samestep.errors import UserError, nearest_engine
from samestep.job import Job
from samestep.message import Message, as_said, message
from samestep.world import World
from samestep.world.foreign_code import as_exceptions

State = dict[str, Any]  # a module's state dict
GROUP = "samestep.engines"  # the entry-point group in which other packages register engines
DEFAULT = "ddp"
BASELINE = "single"  # the engine whose speed the ratios are of


@dataclass(frozen=True)
class Numerics:
    """How an engine rounds. `verify` applies the same rounding in the reference to measure its bounds."""

    rounds_to: str | None = None
    """The dtype that gradients are cast to, such as 'float16'. None: the dtype of the training."""

    lossy: bool = False
    """True if the engine is inexact by design. Its loop is proven with the settings in `without`, and must be the same.
    Its numerics are then measured in float32 with the inexact part on, and the verdict is 'approximate', never 'same'.
    An engine that autocasts must do so around run.loss, where samestep detects it: a model may have no operation that
    autocast lowers, and its measurement would look too exact."""

    without: Mapping[str, Any] = field(default_factory=dict)
    """The settings that turn off the inexact part of a lossy engine. Empty: float64 turns it off."""

    widest: Literal["float64", "float32"] = "float64"
    """The widest dtype that the engine supports. The proof uses it."""

    exact_steps: int = 0
    """How many of the first steps of a lossy engine are exact. PowerSGD, for example, sends whole gradients at
    first."""

    rounds: Literal["passes", "sums", "all"] = "all"
    """What the engine rounds. 'passes': the forward and the backward pass; the ranks' gradients are averaged in the
    dtype of the weights. 'sums': this average alone; losses are exact. 'all': both."""


@dataclass(frozen=True)
class Layout:
    """How an engine distributes a step over its replicas. The reference reproduces it."""

    replicas: int
    """The number of model copies that each process a part of the global batch."""

    split: Literal["even", "chunk"] = "even"
    """How rows are divided over the replicas. 'even' gives the remainder to the low ranks (7 rows over 3: 3, 2, 2).
    'chunk' divides as torch.chunk does (5 rows over 4: 2, 2, 1, so one replica fewer)."""

    buffers: Literal["rank0", "local"] = "rank0"
    """Whose buffers (BatchNorm's statistics) a replica has. 'rank0': replica 0's buffers replace the others' before the
    first forward pass of each step. 'local': every replica keeps its own. The result has rank 0's in both cases."""

    every_gradient: bool = False
    """True if a parameter without a gradient is an error, as under DDP, or if the step changes it all the same."""

    lone_batchnorm: bool = False
    """True if torch's SyncBatchNorm cannot reach the other replicas."""

    no_scalars: bool = False
    """True if a parameter without dimensions is an error, as under FSDP."""

    no_optimizers: Mapping[str, str | Message] = field(default_factory=dict)
    """Name of an optimizer's class -> why the engine cannot take it."""

    no_phases: bool = False
    """True if the engine takes one optimizer, not several in turn."""

    closures: bool = False
    """True if the engine's loop passes `run.closure` to the optimizer's step, as LBFGS needs."""

    micro_batches: int = 1
    """The fewest micro-batches that a step has on each replica. Job.micro_batch can ask for more."""

    reduces_on_cpu: bool = False
    """True if ranks on GPUs also reduce tensors that are on the CPU."""


@dataclass(frozen=True)
class Needs:
    """What an engine needs to run."""

    processes: str = "group"
    """The processes that run the engine. 'group': one for each device, which can form torch's process group. 'one': one
    process that drives all devices. Other names: those in a launcher's `starts` (Horovod's ranks need horovodrun, Ray
    Train's ranks need its own launcher)."""

    packages: tuple[str, ...] = ()
    """The modules that the engine imports besides torch."""

    install: str = ""
    """The command that installs `packages`. '': pip install."""

    preloads: tuple[str, ...] = ()
    """The modules of `packages` that take long to import. The ranks of a proof are forked from a process that has
    them."""

    missing: Callable[[tuple[str, ...]], Message | str | None] = field(default=lambda devices: None)
    """Called as missing(devices). Returns why the engine cannot run on these devices of this machine; None where it
    can."""

    no_threads: Message | str = message("library_was_not_tried_with_threads")  # noqa: RUF009 - frozen
    """Why the engine's ranks cannot be threads of one process. '': they can."""


@dataclass(frozen=True)
class Checks:
    """What an engine knows about jobs that it cannot train, and about the errors of its library."""

    settings: Callable[..., None] | None = None
    """Called as settings(model, **settings). Raises UserError for a setting that does not fit the model. None: every
    setting fits."""

    units: Callable[..., list[Any]] | None = None
    """Called as units(model, **settings). Returns the modules that the ranks gather together, at each of their calls.
    None: the ranks gather no modules."""

    explain: Callable[[BaseException, Job], str | Message | None] = field(default=lambda error, job: None)
    """Called as explain(error, job). Returns a sentence or a message about an error of the engine's library that the
    user can fix; None for other errors."""

    says_lost: Callable[[BaseException], bool] = field(default=lambda error: False)
    """Called as says_lost(error). Returns whether an error of the engine's library only means that another rank has
    ended."""

    cannot_skip: str | Message = ""
    """Why `--on-nan skip` cannot leave out a step of this engine. '': it can."""

    cannot_spot_check: str | Message = message("engine_was_not_tried_with_spot_checks")  # noqa: RUF009 - frozen
    """Why --spot-check does not replay the steps of this engine. '': it does."""

    divides: Callable[..., Message | None] | None = None
    """Called as divides(job, world, **settings), before any rank starts. Returns how the ranks of a replica divide the
    job's model, for the user to read. Raises UserError if they cannot divide it. None: the ranks do not divide the
    model."""


@dataclass(frozen=True)
class Engine:
    """A way to train: the constant ENGINE of a module in engines/, or of another package's."""

    purpose: str
    """A description in about six words, for `samestep engines`."""

    train: Callable[..., State]
    """Called as train(job, world, run, **settings). Trains with the methods of `run`, a samestep.training.Run, and
    returns the full state dict on rank 0. Its keyword arguments are the engine's settings, with their types and
    defaults, as --set-engine sets them."""

    layout: Callable[..., Layout]
    """Called as layout(world, **settings). Returns how the engine distributes a step over its replicas."""

    needs: Needs = Needs()
    """What the engine needs to run."""

    numerics: Callable[..., Numerics] = field(default=lambda **settings: Numerics())
    """Called as numerics(**settings). Returns how the engine rounds."""

    checks: Checks = Checks()
    """What the engine knows about jobs that it cannot train, and about the errors of its library."""

    close: Callable[[], None] | None = None
    """Called by each rank after its last training. None: nothing is called."""

    fragments: Callable[[Any, World], list[Any]] | None = None
    """Called as fragments(model, world). Returns the samestep.rank.checkpoint_state.Fragment objects of the optimizer's
    flat parameters; `model` is what the engine passes to run.loss. None: the optimizer has the model's parameters."""

    axes: tuple[str, ...] = ("data",)
    """The axes of a world.mesh.Mesh along which the ranks can be arranged. Without --mesh all ranks are along the
    first."""

    @property
    def divides_model(self) -> bool:
        """Whether the ranks divide the model, or its rows' positions, where no --mesh says how they are arranged: not
        where each has all of it, or gathers all of it."""
        return self.axes[0] not in ("data", "shard")


def names() -> list[str]:
    """Lists the engines without importing them: the files in engines/, and the entry points of other packages in the
    group `samestep.engines`."""
    return sorted(builtin_names() | {point.name for point in _external_engines()})


def shadowed_names() -> list[str]:
    """Lists the engines of other packages that have the name of a built-in engine, as 'package.name'; none is used."""
    points = [point for point in _external_engines() if point.name in builtin_names()]
    return sorted(f"{point.dist.name if point.dist else point.value}.{point.name}" for point in points)


@cache
def _external_engines() -> tuple[EntryPoint, ...]:
    """Returns the engines of other packages. Cached: the search takes 10 ms, and runs for every engine."""
    return tuple(entry_points(group=GROUP))


@cache
def builtin_names() -> set[str]:
    """Returns the built-in engines: the files in engines/."""
    folder = str(Path(__file__).with_name("engines"))
    return {m.name for m in pkgutil.iter_modules([folder])}


def check(name: str) -> None:
    """Raises UserError with the nearest known name when there is no such engine."""
    if name not in names():
        raise UserError(message("no_such_engine", engine=name, hint=nearest_engine(name, names())))


def load(name: str) -> Engine:
    """Imports an engine. Raises UserError when there is no such engine, or its module has no ENGINE."""
    check(name)
    if name in builtin_names():
        engine: Engine = importlib.import_module(f"samestep.engines.{name}").ENGINE
        return engine
    with as_exceptions():
        loaded = next(point for point in _external_engines() if point.name == name).load()
        declared = getattr(loaded, "ENGINE", loaded)
    if not isinstance(declared, Engine):
        raise UserError(message("package_declares_no_engine", module=__name__))
    return declared


def missing(engine: Engine, devices: tuple[str, ...]) -> Message | None:
    """Returns why an engine cannot run on this machine; None where it can."""
    absent = [package for package in engine.needs.packages if find_spec(package) is None]
    if absent:
        return message("package_not_installed", package=absent[0])
    why = engine.needs.missing(devices)
    return as_said(why) if why else None


def without_distributed(devices: tuple[str, ...]) -> Message | None:
    """Returns why an engine that needs torch.distributed cannot run here, or None: its Needs(missing=…)."""
    import torch.distributed as dist

    return None if dist.is_available() else message("torch_without_distributed")
