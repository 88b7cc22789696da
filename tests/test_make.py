"""`make demo`, as the Makefile types it."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from budget import budget
from ranks import ELSEWHERE
from samestep import engine
from samestep.launch.fork_client import SOCKETS

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import starts  # noqa: E402 - a script's folder is on the path when it runs

SHORTER = ("--rounds", "1", "--measured-steps", "4", "--warmup-steps", "1")  # than the demo's 3, 8 and 3


def test_the_demos_command_stands_in_the_makefile_alone() -> None:
    """What `make` runs, what the benchmark times and what the README tells to type are one command."""
    make = ["make", "--no-print-directory", "--dry-run", "demo"]  # `make test` is a make above this one
    typed = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, timeout=budget(30))
    assert typed.stdout.splitlines()[-1].endswith(f"/samestep {' '.join(starts.demo_command())}"), typed
    for page in ("README.md", "README.zh.md"):
        assert "    make demo\n" in (ROOT / page).read_text()


@pytest.mark.check
def test_the_demo(tmp_path: Path) -> None:
    """From nothing but an installed samestep: a row for each engine, the report, and what to type next.

    No engine is silently absent: each is the same, approximate by design, or says why it cannot run here.
    """
    typed = [sys.executable, "-m", "samestep", *starts.demo_command(), *SHORTER]
    fresh = {name: value for name, value in os.environ.items() if name != SOCKETS} | {"COLUMNS": "100"}
    done = subprocess.run(typed, cwd=tmp_path, env=fresh, capture_output=True, text=True, timeout=budget(300))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    # A command to paste is not broken.
    assert max(len(line) for line in lines if "pip install" not in line) <= 100, done.stdout
    # The second table begins with the same names.
    rows = {row.split()[0]: row for row in reversed(lines) if row.strip()}
    for name in ("single", "ddp", "fsdp", "zero"):  # those that need no more than torch
        # Of one round there is no interval.
        assert re.search(r"same step.* [\d,]+ +– +\d\.\d\d ", rows[name]), rows[name]
    assert "dataparallel (no-op on CPU)" in rows["Not"]
    (report,) = tmp_path.glob("runs/*/report.html")
    results = json.loads(report.with_name("results.json").read_text())
    verdicts = {row["engine"]: row["verdict"] for row in results["engines"]}
    expected = {name: "same" for name in engine.names()} | {"amp": "approximate", "dataparallel": "unavailable"}
    expected |= {"context": "refused", "expert": "refused"}  # digits has neither attention nor experts
    missing = {name for name, verdict in verdicts.items() if verdict == "unavailable"} - {"dataparallel"}
    assert not missing - {*ELSEWHERE} or "CI" not in os.environ
    assert {**verdicts, **dict.fromkeys(missing, "same")} == expected
    assert results["command"] == shlex.join(["samestep", *typed[3:]])
    assert "<html" in report.read_text() and lines[-2] == f"report: {report.relative_to(tmp_path)}"
    assert lines[-1].startswith("next:   samestep verify my_job.py")
