"""Inspects the engines before a launch: which run here, what is missing, and how they divide a step."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

from torch import nn

from samestep import engine as engines
from samestep.engine import Layout, Numerics
from samestep.errors import UserError, nearest_name
from samestep.job import Job
from samestep.message import Message, as_said, message
from samestep.records.files import as_json
from samestep.records.inspection import EngineFacts, Question
from samestep.tasks.inspect.dry_run import Units
from samestep.tasks.inspect.load import values_of
from samestep.world import World
from samestep.world.foreign_code import as_exceptions, error_line
from samestep.world.mesh import Mesh

Divides = Callable[[Job], Message | None]
# An engine on another mesh, and what divides a job's model there; None: its ranks do not divide it.
OnMesh = tuple[EngineFacts, Divides | None]


@dataclass(frozen=True)
class EngineDemands:
    """What the engines of a command ask of a job."""

    check_model: Callable[[nn.Module], None] = field(default=lambda model: None)
    """Called with the job's model. Raises UserError for a setting of an engine that does not fit the model."""

    replicas: Sequence[int] = ()
    """The numbers of replicas of the engines whose ranks are arranged in a mesh."""

    units: Mapping[str, Units] = field(default_factory=dict)
    """Engine -> what returns the modules of a model that its ranks gather."""

    divides: Mapping[str, Divides] = field(default_factory=dict)
    """Engine -> what divides a job's model among its ranks."""

    in_parts: Mapping[str, Layout] = field(default_factory=dict)
    """Engine -> its layout, of those whose steps have micro-batches of their own."""

    other_meshes: Mapping[str, Sequence[OnMesh]] = field(default_factory=dict)
    """Engine -> the meshes of another size that are tried for a second proof, in this order."""

    @property
    def least_rows(self) -> int:
        """How many rows give each micro-batch two, with the engines that have micro-batches of their own; else 0."""
        return max((2 * layout.replicas * layout.micro_batches for layout in self.in_parts.values()), default=0)


NO_DEMANDS = EngineDemands()


def demands_of(rows: Sequence[EngineFacts], question: Question, device: str) -> EngineDemands:
    """Returns what the engines of a question ask of its job. rows: of all engines. device: of the first rank."""
    asked = asked_engines(rows, question.engines)
    return EngineDemands(
        check_model=partial(_check_settings, asked),
        replicas=[row.layout.replicas for row in rows if row.mesh and row.layout],
        units=_units(asked),
        divides=_divides(asked, device),
        in_parts={row.name: row.layout for row in asked if row.layout and row.layout.micro_batches > 1},
        other_meshes={} if question.also == 0 else _other_meshes(asked, question.also),
    )


def asked_engines(rows: Sequence[EngineFacts], names: Sequence[str]) -> list[EngineFacts]:
    """Returns the engines of a command that can run here. names: as the command gives them; none: all."""
    return [row for row in rows if row.available and (row.name in names or not names)]


def inspect_engines(
    devices: tuple[str, ...],
    nproc: int,
    options: Mapping[str, str],
    names: Sequence[str],
    mesh: Mesh | None = None,
) -> list[EngineFacts]:
    """Returns the facts of every engine: whether it runs on these devices, why not, its settings, and its layout.

    nproc: number of ranks. options: texts of --set-engine; 'key' sets every engine that has it, 'engine.key' one.
    names: the engines of this command; none: all. mesh: of --mesh. Raises UserError for a key that none of these has,
    and for a value of the wrong type.
    """
    rows, used = [], set()
    for name in engines.names():
        try:
            engine = engines.load(name)
        except Exception as error:  # a broken engine of another package must not break the rest
            rows.append(_broken(name, _why_not_loaded(error)))
            continue
        try:
            known = _settings(engine)
            texts = {}
            for option, text in options.items():
                owner, _, key = option.rpartition(".")
                if (owner == name or not owner) and key in known and (name in names or not names):
                    texts[key] = text
                    used.add(option)
            chosen = values_of(engine.train, texts, message("the_engine", engine=name), "--set-engine") if texts else {}
            with as_exceptions():
                row = _facts(name, engine, devices, nproc=nproc, known=known, chosen=chosen, asked=mesh)
                json.dumps(as_json(row))  # it must be JSON for the parent
        except UserError:
            raise  # about a value of --set-engine
        except Exception as error:
            row = _broken(name, message("engine_does_not_answer", error=error_line(error)))
        rows.append(row)
    rows += [_broken(name, message("engine_is_shadowed")) for name in engines.shadowed_names()]
    for option in options:
        if option not in used:
            every = {f"{row.name}.{key}" for row in rows for key in row.settings}
            listed = sorted(key for key in every if not names or key.partition(".")[0] in names)
            hint = nearest_name(option, listed) if listed else message("engines_have_no_settings")
            raise UserError(message("no_engine_has_this_setting", option=option, hint=hint))
    return rows


def _why_not_loaded(error: BaseException) -> Message:
    if isinstance(error, UserError):
        return message("engine_cannot_be_used", why=error.message)
    return message("engine_does_not_import", error=error_line(error))


def _check_settings(asked: Sequence[EngineFacts], model: nn.Module) -> None:
    """Has engines check the settings that were chosen, with the job's model. Raises UserError for one that does not fit
    the model."""
    for row in asked:
        if row.chosen and (check := engines.load(row.name).checks.settings):
            check(model, **row.settings)


def _divides(asked: Sequence[EngineFacts], device: str) -> dict[str, Divides]:
    """Returns the engines whose ranks divide a model -> what divides a job's."""
    taking = [row for row in asked if takes_mesh(row)]
    dividing = [(row, engines.load(row.name).checks.divides) for row in taking]
    worlds = {row.name: World(size=row.processes, devices=(device,), mesh=row.mesh) for row in taking}
    return {row.name: partial(divides, world=worlds[row.name], **row.settings) for row, divides in dividing if divides}


def engines_on_parts(asked: Sequence[EngineFacts]) -> Iterator[EngineFacts]:
    """Yields the facts of each engine whose ranks are arranged in a mesh, on each part of it."""
    for row in asked:
        for part in row.mesh.parts if row.mesh else ():
            if facts := on_mesh(row, part):
                yield facts


def on_mesh(row: EngineFacts, mesh: Mesh) -> EngineFacts | None:
    """Returns the facts of an engine whose ranks are arranged in another mesh; None where its layout is not known."""
    world = World(size=mesh.size, devices=row.devices[:1], mesh=mesh)
    try:
        with as_exceptions():
            layout = engines.load(row.name).layout(world, **row.settings)
    except Exception:
        return None  # an engine of another package: it is not tried on this mesh
    return replace(row, processes=world.size, layout=layout, mesh=mesh)


def _other_meshes(asked: Sequence[EngineFacts], ranks: int | None) -> dict[str, list[OnMesh]]:
    """Returns the engines whose ranks are arranged in a mesh -> the meshes of another size, in the order in which they
    are to be tried. ranks: as of Mesh.of_other_size."""
    meshes = {
        row.name: [facts for mesh in row.mesh.of_other_size(row.axes, ranks) if (facts := on_mesh(row, mesh))]
        for row in asked
        if row.mesh and row.mesh.size > 1 and takes_mesh(row)
    }
    return {
        name: [(facts, _divides([facts], facts.devices[0]).get(name)) for facts in candidates]
        for name, candidates in meshes.items()
    }


def takes_mesh(row: EngineFacts) -> bool:
    """Returns whether an engine's ranks can be arranged as they are asked to be."""
    return not row.mesh or {*row.mesh.sizes} <= {*row.axes}


def _units(asked: Sequence[EngineFacts]) -> dict[str, Units]:
    """Returns the engines that gather parts of a model -> what returns the modules of a model that they gather."""
    with_units = [(row, engines.load(row.name).checks.units) for row in asked]
    return {row.name: partial(units, **row.settings) for row, units in with_units if units}


def _settings(engine: engines.Engine) -> dict[str, Any]:
    """Returns an engine's settings and their defaults: the keyword arguments of its train()."""
    parameters = inspect.signature(engine.train).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


def _broken(name: str, reason: Message) -> EngineFacts:
    return EngineFacts(name, available=False, reason=reason)


def _facts(
    name: str,
    engine: engines.Engine,
    devices: tuple[str, ...],
    nproc: int,
    known: Mapping[str, Any],
    chosen: Mapping[str, Any],
    asked: Mesh | None,
) -> EngineFacts:
    reason = engines.missing(engine, devices)
    alone = engine.needs.processes == "one"
    mesh = None if alone else asked
    if not (mesh or alone) and engine.divides_model:
        mesh = Mesh(**{engine.axes[0]: nproc})
    world = World(devices=devices[:nproc]) if alone else World(size=nproc, devices=devices[:1], mesh=mesh)
    package = engine.needs.packages[0] if engine.needs.packages else "torch"
    try:
        installed: str | None = version(package)
    except PackageNotFoundError:
        installed = None
    settings = {**known, **chosen}
    numerics = engine.numerics(**settings)
    return EngineFacts(
        name=name,
        available=reason is None,
        reason=reason,
        install=engine.needs.install or f"pip install {_requirements(name, engine.needs.packages)}",
        version=installed,
        purpose=engine.purpose,
        process_kind=engine.needs.processes,
        preloads=engine.needs.preloads,
        processes=world.size,
        devices=devices[:nproc] if alone else devices,
        settings=settings,
        chosen={key: value for key, value in chosen.items() if value != known[key]},
        layout=engine.layout(world, **settings),
        numerics=numerics,
        no_threads=as_said(engine.needs.no_threads) if engine.needs.no_threads else None,
        axes=() if alone else engine.axes,
        mesh=mesh,
        no_spot_checks=_why_no_spot_checks(engine, numerics, settings, world),
        cannot_skip=as_said(engine.checks.cannot_skip) if engine.checks.cannot_skip else None,
    )


def _why_no_spot_checks(
    engine: engines.Engine, numerics: Numerics, settings: Mapping[str, Any], world: World
) -> Message | None:
    """Returns why a step of an engine with these settings is not replayed in one process; None where it is."""
    if world.replicas < world.size:
        return message("spot_checks_need_whole_replicas")
    if cannot := engine.checks.cannot_spot_check:
        return as_said(cannot)
    inexact = [f"{name}={settings.get(name)}" for name in numerics.without] if numerics.lossy else []
    return message("setting_is_inexact", setting=", ".join(inexact)) if inexact else None


def _requirements(extra: str, needs: Sequence[str]) -> str:
    """Returns the requirements of samestep's extra `extra`, quoted for a shell; without such an extra, `needs`."""
    try:
        entries = [text.partition(";") for text in requires("samestep") or []]
    except PackageNotFoundError:
        entries = []
    wanted = [what.strip() for what, _, marker in entries if re.search(rf"extra == ['\"]{extra}['\"]", marker)]
    return " ".join(f"'{what}'" if re.search("[<>=]", what) else what for what in wanted or needs or ["torch"])
