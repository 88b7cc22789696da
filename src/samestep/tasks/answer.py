"""Answers the parent's questions before a launch. A question is a JSON file; the answer is written beside it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from samestep import engine as engines
from samestep.doctor.records import Probed, ProbeQuestion, Probes
from samestep.errors import UserError, printable_message
from samestep.rank import hardware
from samestep.records.files import read, write
from samestep.records.inspection import (
    ANSWER,
    MISTAKE,
    EjectQuestion,
    EngineFacts,
    Inspection,
    Mistake,
    Question,
    Script,
)
from samestep.tasks.eject import eject
from samestep.tasks.inspect.engines import asked_engines, demands_of, engines_on_parts, inspect_engines, on_mesh
from samestep.tasks.inspect.job import inspect_job
from samestep.world.mesh import parse_mesh


def inspect_main(path: str) -> None:
    """Reads the Question in the file `path` and writes an Inspection, or a Mistake, beside it."""
    _answer(Path(path), Question, _inspection)


def eject_main(path: str) -> None:
    """Reads the EjectQuestion in the file `path` and writes a Script, or a Mistake, beside it."""
    _answer(Path(path), EjectQuestion, _script)


def probe_main(path: str) -> None:
    """Reads the ProbeQuestion in the file `path` and writes Probes beside it."""
    _answer(
        Path(path),
        ProbeQuestion,
        lambda question: Probes(tuple(Probed.on_this_machine(name, question.info) for name in question.probes)),
    )


def _answer(path: Path, kind: Any, answer: Callable[[Any], Inspection | Script | Probes]) -> None:
    sys.dont_write_bytecode = True  # who only looks leaves no __pycache__ beside the job
    try:
        write(path.with_name(ANSWER), answer(read(kind, path)))
    except UserError as error:
        write(path.with_name(MISTAKE), Mistake(printable_message(error.message)))


def _inspection(question: Question) -> Inspection:
    devices = hardware.find_devices(question.device)
    per_machine = question.replicas or ranks_by_default(devices, as_threads=question.as_threads)
    replicas = per_machine * question.machines
    rows = inspect_engines(devices, replicas, question.engine_settings, question.engines, question.mesh)
    job, parts = None, list[EngineFacts]()
    if question.job:
        job = inspect_job(question, replicas, devices[0], demands_of(rows, question, devices[0]))
        parts += engines_on_parts(asked_engines(rows, question.engines))
    second: list[EngineFacts] = []
    if job and job.proof.second:
        second_engines = inspect_engines(devices, job.proof.second.ranks, question.engine_settings, question.engines)
        second += [facts for facts in second_engines if not facts.mesh]
    meshes = {name: size.mesh for name, size in job.proof.second_meshes.items() if size.mesh} if job else {}
    second += [found for row in rows if row.name in meshes and (found := on_mesh(row, meshes[row.name]))]
    return Inspection(
        devices,
        hardware.facts(devices[0]),
        replicas,
        tuple(rows),
        job,
        second_engines=tuple(second),
        parts=tuple(parts),
    )


def ranks_by_default(devices: tuple[str, ...], *, as_threads: bool) -> int:
    """Returns how many ranks a machine has where nobody says: one for each GPU, but 2 on a CPU, and where they are
    threads at least 2."""
    if devices[0] == "cpu":
        return 2
    return max(2, len(devices)) if as_threads else len(devices)


def _script(question: EjectQuestion) -> Script:
    engines.check(question.engine)
    asked = parse_mesh(question.mesh)
    rows = inspect_engines(("cpu",), question.size, question.engine_settings, [question.engine], asked)
    row = next(row for row in rows if row.name == question.engine)
    mesh = row.mesh or asked
    return eject(
        question.job,
        question.settings,
        question.engine,
        settings=row.settings,
        size=question.size,
        file=question.file,
        mesh=mesh,
    )
