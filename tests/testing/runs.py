"""Runs of pytest with the plugin, on test files that these tests write."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from budget import budget

PYTEST = [sys.executable, "-m", "pytest", "-p", "samestep.testing", "-p", "no:cacheprovider"]


def environment() -> dict[str, str]:
    """Without what a run of pytest inherits from the one that runs these tests."""
    inherited = {name for name in os.environ if name.startswith(("PYTEST_", "COV_"))}
    return {name: value for name, value in os.environ.items() if name not in inherited} | {"COLUMNS": "200"}


def run(folder: Path, source: str, *options: str, typed: str | None = None) -> subprocess.CompletedProcess[str]:
    """Writes a test file, and runs pytest on it. typed: on its stdin."""
    (folder / "test_it.py").write_text(source)
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [*PYTEST, *options, "test_it.py"]
    stdin = {"stdin": subprocess.DEVNULL} if typed is None else {"input": typed}
    return subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=budget(60), **stdin
    )


def outcomes(done: subprocess.CompletedProcess[str]) -> dict[str, int]:
    """Returns how many tests had each outcome, as {"passed": 2, "failed": 1}, from pytest's last line."""
    counts = pytest.RunResult.parse_summary_nouns(done.stdout.splitlines())
    return {outcome: number for outcome, number in counts.items() if outcome != "warnings"}


def interrupt(process: subprocess.Popen[str]) -> str:
    """Types Ctrl-C. Returns what the process has printed until it ended."""
    process.send_signal(signal.SIGINT)
    return process.communicate(timeout=budget(30))[0]
