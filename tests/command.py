"""The command `samestep` as tests type it, and the jobs that they give it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import command_server
from budget import budget
from samestep.launch.fork_client import SOCKETS
from samestep.message import Message
from samestep.records.files import read
from samestep.records.runs import COMMAND, CommandRecord

TESTS = Path(__file__).parent
JOBS = TESTS / "launch" / "jobs.py"
WATCHED = TESTS / "jobs" / "watched.py"
DRAWN = f"{TESTS}/conformance/jobs_drawn.py:job"
DIGITS = ("digits", "--set", "width=16", "--set", "global_batch=64")  # a step that costs a tenth of the default job's


def samestep(
    *arguments: str,
    out: Path | None = None,
    imports: float = 150,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end, in a wide terminal. Its workers are forked, where it names no launcher. So is the
    command, where a server runs that forks commands and `env` changes no PYTHON… variable.

    imports: its budget.
    """
    given = [*arguments, *(["--out", str(out)] if out else [])]
    if arguments[0] in ("run", "evaluate") and not {"--launcher", "--port", "--dry-run", "--to", "--help"} & {
        *arguments
    }:
        given += ["--launcher", "fork"]
    if arguments[0] == "verify" and "--also" not in arguments:
        given += ["--also", "none"]  # a test that looks at the second number of ranks asks for it
    wide = os.environ | {"COLUMNS": "200"} | (env or {})
    server = Path(os.environ.get(SOCKETS, os.devnull)) / command_server.NAME
    if server.exists() and _of_python(wide) == OF_PYTHON:
        return command_server.run(given, server, wide, cwd or Path.cwd(), budget(imports))
    command = [sys.executable, "-m", "samestep", *given]
    return subprocess.run(command, capture_output=True, text=True, timeout=budget(imports), env=wide, cwd=cwd)


def _of_python(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith("PYTHON")}


OF_PYTHON = _of_python(os.environ)  # of this process, whose server has started alike


def failure(folder: Path) -> Message:
    """What the command that filled a folder of results has failed with."""
    reason = read(CommandRecord, folder / COMMAND).reason
    assert reason
    return reason


def has_begun(folder: Path) -> bool:
    """Whether the training in `folder` has taken steps."""
    told = folder / "progress.json"
    return told.exists() and bool(json.loads(told.read_text()).get("done"))
