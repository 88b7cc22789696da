"""`make demo`, as the Makefile types it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from budget import budget
from samestep import engine
from samestep.launch.fork_client import SOCKETS

MAKEFILE = Path(__file__).parents[1] / "Makefile"


@pytest.mark.check
def test_the_demo(tmp_path: Path) -> None:
    """From nothing but an installed samestep: a row for each engine, and the report."""
    (line,) = re.findall(r"^demo:.*\n\t\$\(BIN\)/samestep (.*)$", MAKEFILE.read_text(), re.M)
    typed = [sys.executable, "-m", "samestep", *line.split()]
    fresh = {name: value for name, value in os.environ.items() if name != SOCKETS} | {"COLUMNS": "100"}
    done = subprocess.run(typed, cwd=tmp_path, env=fresh, capture_output=True, text=True, timeout=budget(600))
    assert done.returncode == 0, done.stderr
    rows = {row.split()[0]: row for row in done.stdout.splitlines() if row.split()[:1] and row[0] != " "}
    assert {*engine.builtin_names()} <= {*rows}, done.stdout
    for name in ("single", "ddp", "fsdp", "zero"):  # those that need no more than torch
        assert re.search(r"same step.* n=3", rows[name]), rows[name]
    (report,) = tmp_path.glob("runs/*/report.html")
    assert "<html" in report.read_text() and f"report: {report.relative_to(tmp_path)}" in done.stdout
