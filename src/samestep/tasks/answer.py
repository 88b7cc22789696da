"""Answers to what the parent asks before any launch: a query's file names the file that the answer goes to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from samestep import engine as engines
from samestep.errors import UserError
from samestep.rank import hardware
from samestep.records.record import write_json
from samestep.tasks.eject import eject
from samestep.tasks.inspect.job import find_devices, inspect_engines, inspect_job


def inspect_main(path: str) -> None:
    """Answers a query about a job and the engines, in the file that the query names."""
    query: dict[str, Any] = json.loads(Path(path).read_text())
    answer: dict[str, Any] = {"error": None}
    try:
        devices = find_devices(query["device"])
        replicas = query["replicas"] or (2 if devices[0] == "cpu" else len(devices))
        replicas *= query["machines"]
        answer |= {
            "devices": devices,
            "machine": hardware.facts(devices[0]),
            "replicas": replicas,
            "engines": inspect_engines(devices, replicas, query["engine_settings"], query["engines"]),
        }
        if query["job"] is not None:
            answer["job"] = inspect_job(query["job"], query["settings"], replicas, query["steps"], devices[0])
    except UserError as error:
        answer["error"] = str(error)
    write_json(Path(query["answer"]), answer)


def eject_main(path: str) -> None:
    """Writes the script that a query asks for into its answer."""
    query: dict[str, Any] = json.loads(Path(path).read_text())
    answer: dict[str, Any] = {"error": None}
    try:
        name = query["engine"]
        engines.check(name)
        facts = inspect_engines(("cpu",), query["size"], query["engine_settings"], [name])
        chosen = next(row["settings"] for row in facts if row["name"] == name)
        answer["script"] = eject(query["job"], query["settings"], name, chosen, query["size"], query["file"])
    except UserError as error:
        answer["error"] = str(error)
    write_json(Path(query["answer"]), answer)
