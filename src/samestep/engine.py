"""The Engine protocol. An engine is a module: one file in engines/, one verb, `train`, holding its whole loop."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from samestep.errors import UserError, nearest
from samestep.job import Job
from samestep.world import World

GROUP = "samestep.engines"  # of the entry points with which other packages bring engines


@dataclass(frozen=True)
class Numerics:
    """How an engine rounds. `verify` measures its bounds with this rounding in the reference.

    rounds_to: the dtype that gradients pass through ('float16', …); None: that of the training itself.
    lossy: True where the engine is inexact by design: its loop is proven with `without`, the settings that turn the
        inexact part off (none where float64 does), and must be the same; its numerics are then measured in float32
        with it on, and the verdict is 'approximate', never 'same'. An engine that autocasts does so around run.loss,
        where it is seen: not every model has something that autocast lowers, and one without would look too exact.
    widest: the widest dtype that it takes, in which it is then proven.
    exact_steps: of a lossy engine, so many first steps are exact (PowerSGD sends whole gradients at first).
    """

    rounds_to: str | None = None
    lossy: bool = False
    without: Mapping[str, Any] = field(default_factory=dict)
    widest: Literal["float64", "float32"] = "float64"
    exact_steps: int = 0


@dataclass(frozen=True)
class Layout:
    """How an engine lays a step out: what the reference must play.

    replicas: how many copies of the model each see a part of the global batch.
    split: 'even' gives the remainder to the low ranks (7 rows over 3: 3, 2, 2);
        'chunk' is torch.chunk's (5 rows over 4: 2, 2, 1, and a replica less).
    buffers: 'rank0' where replica 0's buffers (BatchNorm's statistics) replace the others' before each step's
        first forward pass; 'local' where every replica keeps its own. Rank 0's are the result either way.
    every_gradient: True where a parameter without a gradient is an error (DDP), or no longer left alone.
    lone_batchnorm: True where torch's SyncBatchNorm would not find the other replicas.
    no_scalars: True where a parameter without dimensions is an error (FSDP).
    """

    replicas: int
    split: Literal["even", "chunk"] = "even"
    buffers: Literal["rank0", "local"] = "rank0"
    every_gradient: bool = False
    lone_batchnorm: bool = False
    no_scalars: bool = False


class Engine(Protocol):
    """What a module in engines/ holds.

    PURPOSE: six words for `samestep engines`. NEEDS: the modules it imports, beyond torch.
    PROCESSES: what it needs started: 'group', a process for each device, which can form torch's process group; 'one',
        one process that drives all its devices; or a name that a launcher has in its STARTS (Horovod's ranks are
        started by its own).
    missing(devices): why it cannot run here with these devices, or None.
    layout(world, **settings): how it lays out a step. numerics(**settings): how it rounds.
    train(job, world, run, **settings): trains with the four verbs of `run`, a samestep.training.Run, and returns the
        full state dict on rank 0. Its keyword arguments are the engine's settings, with their types and defaults: what
        --set-engine sets.
    An engine may also have
    INSTALL: the line that installs it, where that is not pip.
    close(): what each rank calls after its last training.
    explain(error, job): the sentence about an error of its library that the user can mend, or None.
    says_lost(error): whether an error of its library only tells that another rank has ended.
    """

    PURPOSE: str
    NEEDS: tuple[str, ...]
    PROCESSES: str

    def missing(self, devices: tuple[str, ...]) -> str | None: ...

    def layout(self, world: World, **settings: Any) -> Layout: ...

    def numerics(self, **settings: Any) -> Numerics: ...

    def train(self, job: Job, world: World, run: Any, **settings: Any) -> dict[str, Any]: ...


def names() -> list[str]:
    """The engines there are, without importing them: the files in engines/, and those that other packages bring with
    an entry point in the group `samestep.engines`."""
    return sorted(builtin_names() | {point.name for point in _others()})


def shadowed_names() -> list[str]:
    """Engines of other packages that are named as one of ours, which they must not replace: 'package.name'."""
    points = [point for point in _others() if point.name in builtin_names()]
    return sorted(f"{point.dist.name if point.dist else point.value}.{point.name}" for point in points)


@cache
def _others() -> tuple[EntryPoint, ...]:
    """What other packages bring. Looking through all that is installed takes 10 ms, and every engine asks."""
    return tuple(entry_points(group=GROUP))


@cache
def builtin_names() -> set[str]:
    """The engines that come with samestep: the files in engines/."""
    folder = str(Path(__file__).with_name("engines"))
    return {m.name for m in pkgutil.iter_modules([folder])}


def check(name: str) -> None:
    """Raises UserError with the nearest known name when there is no such engine."""
    if name not in names():
        raise UserError(f"there is no engine '{name}'; {nearest(name, names())}")


def load(name: str) -> Engine:
    """Imports one engine's file. Raises UserError when there is no such engine."""
    check(name)
    if name in builtin_names():
        return cast(Engine, importlib.import_module(f"samestep.engines.{name}"))
    point = next(point for point in _others() if point.name == name)
    return cast(Engine, point.load())


def missing(engine: Engine, devices: tuple[str, ...]) -> str | None:
    """Why an engine cannot run here, as a short reason; None where it can."""
    absent = [need for need in engine.NEEDS if find_spec(need) is None]
    if absent:
        return f"{absent[0]} is not installed"
    return engine.missing(devices)
