"""Runs `samestep` as a user does, in a session of its own, which ends whole at the deadline."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

AS_WIDE = {"COLUMNS": "200", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Ended:
    """What a command has said. code: None where the deadline has ended it."""

    code: int | None
    output: str
    error: str


def ended(
    words: Sequence[str], folder: Path, *, cwd: Path, limit_s: float, environment: Mapping[str, str] | None = None
) -> Ended:
    """Runs `samestep WORDS` in `cwd`, and ends it after limit_s, with all processes that work below `folder`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "samestep", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env={**os.environ, **AS_WIDE, **(environment or {})},
        start_new_session=True,
    )
    try:
        output, error = process.communicate(timeout=limit_s)
        code: int | None = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            output, error = process.communicate(timeout=15)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, error = process.communicate()
        code = None
    end_processes(folder)
    return Ended(code, output, error)


def end_processes(folder: Path) -> None:
    """Ends the processes that work in a folder: ranks that a hanging script has started itself."""
    for process in psutil.process_iter(["cwd"]):
        if process.info["cwd"] and Path(process.info["cwd"]).is_relative_to(folder):
            process.kill()
