"""Answers what the parent asks before any launch: a question is a file, its answer another one beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from samestep import engine as engines
from samestep.errors import UserError
from samestep.rank import hardware
from samestep.records.files import read, write
from samestep.records.inspection import (
    ANSWER,
    MISTAKE,
    EjectQuestion,
    Inspection,
    Mistake,
    Question,
    Script,
)
from samestep.tasks.eject import eject
from samestep.tasks.inspect.engines import inspect_engines
from samestep.tasks.inspect.job import inspect_job


def inspect_main(path: str) -> None:
    """Answers a Question."""
    _answer(Path(path), Question, _inspection)


def eject_main(path: str) -> None:
    """Answers an EjectQuestion."""
    _answer(Path(path), EjectQuestion, _script)


def _answer(path: Path, kind: Any, answer: Callable[[Any], Inspection | Script]) -> None:
    try:
        write(path.with_name(ANSWER), answer(read(kind, path)))
    except UserError as error:
        write(path.with_name(MISTAKE), Mistake(str(error)))


def _inspection(asked: Question) -> Inspection:
    devices = hardware.find_devices(asked.device)
    replicas = (asked.replicas or (2 if devices[0] == "cpu" else len(devices))) * asked.machines
    found = inspect_engines(devices, replicas, asked.engine_settings, asked.engines)
    job = asked.job and inspect_job(asked.job, asked.settings, replicas, asked.steps, devices[0])
    return Inspection(devices, hardware.facts(devices[0]), replicas, tuple(found), job or None)


def _script(asked: EjectQuestion) -> Script:
    engines.check(asked.engine)
    rows = inspect_engines(("cpu",), asked.size, asked.engine_settings, [asked.engine])
    settings = next(row.settings for row in rows if row.name == asked.engine)
    return Script(eject(asked.job, asked.settings, asked.engine, settings, asked.size, asked.file))
