"""Engine: what an engine declares. It is one module in engines/; its function `train` holds the whole training loop."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
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
    """How an engine rounds. `verify` applies the same rounding in the reference to measure its bounds.

    rounds_to: the dtype that gradients are cast to ('float16', …); None: the dtype of the training.
    lossy: True where the engine is inexact by design. Its loop is proven with the settings `without`, which turn the
        inexact part off (none where float64 does), and must be the same. Its numerics are then measured in float32
        with the inexact part on, and the verdict is 'approximate', never 'same'. An engine that autocasts must do so
        around run.loss, where samestep detects it: a model may have no operation that autocast lowers, and its
        measurement would look too exact.
    widest: the widest dtype that the engine supports; the proof uses it.
    exact_steps: the number of first steps of a lossy engine that are exact (PowerSGD sends whole gradients at first).
    rounds: what is rounded. 'passes': the forward and the backward pass, and the ranks' gradients are averaged in the
        dtype of the weights. 'sums': this average alone, and losses are exact. 'all': both.
    """

    rounds_to: str | None = None
    lossy: bool = False
    without: Mapping[str, Any] = field(default_factory=dict)
    widest: Literal["float64", "float32"] = "float64"
    exact_steps: int = 0
    rounds: Literal["passes", "sums", "all"] = "all"


@dataclass(frozen=True)
class Layout:
    """How an engine distributes a step over its replicas; the reference reproduces it.

    replicas: the number of model copies that each process a part of the global batch.
    split: 'even' gives the remainder to the low ranks (7 rows over 3: 3, 2, 2);
        'chunk' splits as torch.chunk (5 rows over 4: 2, 2, 1, so one replica fewer).
    buffers: 'rank0' where replica 0's buffers (BatchNorm's statistics) replace the others' before each step's
        first forward pass; 'local' where every replica keeps its own. The result has rank 0's in both cases.
    every_gradient: True where a parameter without a gradient is an error (DDP), or is changed all the same.
    lone_batchnorm: True where torch's SyncBatchNorm cannot reach the other replicas.
    no_scalars: True where a parameter without dimensions is an error (FSDP).
    no_optimizers: class of optimizer -> why the engine cannot take it.
    no_phases: True where the engine takes one optimizer, not several in turn.
    closures: True where the engine's loop gives `run.closure` to the optimizer's step, as LBFGS demands.
    micro_batches: the fewest that a step has on each replica; more where Job.micro_batch says so.
    reduces_on_cpu: True where ranks on GPUs also reduce tensors that are on the CPU.
    """

    replicas: int
    split: Literal["even", "chunk"] = "even"
    buffers: Literal["rank0", "local"] = "rank0"
    every_gradient: bool = False
    lone_batchnorm: bool = False
    no_scalars: bool = False
    no_optimizers: Mapping[str, str | Message] = field(default_factory=dict)
    no_phases: bool = False
    closures: bool = False
    micro_batches: int = 1
    reduces_on_cpu: bool = False


@dataclass(frozen=True)
class Needs:
    """What an engine needs to run.

    processes: 'group', one for each device, which can form torch's process group; 'one', one process that drives all
    devices; or a name in a launcher's `starts` (Horovod's ranks need horovodrun, Ray Train's its own). packages: the
    modules that it imports besides torch. install: the command that installs them, where it is not pip install.
    preloads: those of their modules that take long to import: a proof's ranks are forked from a process that has them.
    missing(devices): why it cannot run on these devices of this machine, or None. no_threads: why its ranks cannot be
    threads of one process; '': they can.
    """

    processes: str = "group"
    packages: tuple[str, ...] = ()
    install: str = ""
    preloads: tuple[str, ...] = ()
    missing: Callable[[tuple[str, ...]], Message | str | None] = field(default=lambda devices: None)
    no_threads: Message | str = message("library_was_not_tried_with_threads")  # noqa: RUF009 - frozen


@dataclass(frozen=True)
class Checks:
    """What an engine knows about jobs that it cannot train, and about its library's errors.

    settings(model, **settings): raises UserError for a setting that does not fit the model. units(model, **settings):
    the modules that its ranks gather together, at each of their calls. explain(error, job): a sentence or a message
    about an error of its library that the user can fix, or None. says_lost(error): whether an error of its library only
    means that another rank has ended. cannot_skip: why --on-nan skip cannot leave out a step of it; '': it can.
    cannot_spot_check: why its steps are not replayed by --spot-check; '': they are.
    divides(job, world, **settings): how the ranks of a replica divide the job's model, for the user to read; None: they
    do not. Raises UserError where they cannot. It is called before any rank starts.
    """

    settings: Callable[..., None] | None = None
    units: Callable[..., list[Any]] | None = None
    explain: Callable[[BaseException, Job], str | Message | None] = field(default=lambda error, job: None)
    says_lost: Callable[[BaseException], bool] = field(default=lambda error: False)
    cannot_skip: str | Message = ""
    cannot_spot_check: str | Message = message("engine_was_not_tried_with_spot_checks")  # noqa: RUF009 - frozen
    divides: Callable[..., Message | None] | None = None


@dataclass(frozen=True)
class Engine:
    """A way to train: the constant ENGINE of a module in engines/, or of another package's.

    purpose: six words for `samestep engines`. train(job, world, run, **settings): trains with the methods of `run`, a
    samestep.training.Run, and returns the full state dict on rank 0. Its keyword arguments are the engine's settings,
    with their types and defaults, as --set-engine sets them. layout(world, **settings): its Layout.
    numerics(**settings): its Numerics. close(): called by each rank after its last training. fragments(model, world):
    the samestep.rank.checkpoint_state.Fragment of its optimizer's flat parameters, where it has those instead of the
    model's; model: what the engine gives to run.loss. axes: of a world.mesh.Mesh, along which its ranks can be
    arranged; without --mesh they all are along the first.
    """

    purpose: str
    train: Callable[..., State]
    layout: Callable[..., Layout]
    needs: Needs = Needs()
    numerics: Callable[..., Numerics] = field(default=lambda **settings: Numerics())
    checks: Checks = Checks()
    close: Callable[[], None] | None = None
    fragments: Callable[[Any, World], list[Any]] | None = None
    axes: tuple[str, ...] = ("data",)

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
    """Imports an engine. Raises UserError when there is no such engine, or one with a member that is missing or
    misspelt."""
    check(name)
    if name in builtin_names():
        engine: Engine = importlib.import_module(f"samestep.engines.{name}").ENGINE
        return engine
    with as_exceptions():
        loaded = next(point for point in _external_engines() if point.name == name).load()
        declared = getattr(loaded, "ENGINE", loaded)
        return declared if isinstance(declared, Engine) else engine_of_members(loaded)


# Before ENGINE, an engine was a module with these members: member -> field. Other packages have such modules.
_MEMBERS = {"PURPOSE": "purpose", "train": "train", "layout": "layout", "numerics": "numerics"}
_OPTIONAL_MEMBERS = {"close": "close", "fragments": "fragments"}
_NEEDS_MEMBERS = {"NEEDS": "packages", "PROCESSES": "processes", "missing": "missing"}
_OPTIONAL_NEEDS_MEMBERS = {"INSTALL": "install"}
_CHECKS_MEMBERS = {"check": "settings", "CANNOT_SKIP": "cannot_skip", "CANNOT_SPOT_CHECK": "cannot_spot_check"}
_CHECKS_MEMBERS |= {name: name for name in ("units", "explain", "says_lost")}
_CLOSE = 0.8  # how much a name must be like a member to be taken for its misspelling


def engine_of_members(module: object) -> Engine:
    """Makes an Engine of a module's members. Raises UserError for one that is missing, and one that is misspelt."""
    required = (*_MEMBERS, *_NEEDS_MEMBERS)
    if absent := [name for name in required if not hasattr(module, name)]:
        raise UserError(f"it has no {absent[0]}")
    known = [*required, *_OPTIONAL_MEMBERS, *_OPTIONAL_NEEDS_MEMBERS, *_CHECKS_MEMBERS]
    for name, value in vars(module).items():
        is_its_own = getattr(value, "__module__", None) in (None, getattr(module, "__name__", None))
        if name in known or name.startswith("_") or isinstance(value, ModuleType) or not is_its_own:
            continue
        if close := get_close_matches(name.lower(), [member.lower() for member in known], n=1, cutoff=_CLOSE):
            meant = next(member for member in known if member.lower() == close[0])
            raise UserError(f"it has no member {name}; did you mean {meant}? If {name} is its own, write _{name}")

    def fields_of(members: Mapping[str, str]) -> dict[str, Any]:
        return {name: getattr(module, member) for member, name in members.items() if hasattr(module, member)}

    needs = Needs(**fields_of(_NEEDS_MEMBERS | _OPTIONAL_NEEDS_MEMBERS))
    checks = Checks(**fields_of(_CHECKS_MEMBERS))
    return Engine(**fields_of(_MEMBERS | _OPTIONAL_MEMBERS), needs=needs, checks=checks)


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
