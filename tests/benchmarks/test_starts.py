"""The benchmark of starts runs, and keeps what it measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from budget import budget

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "starts.py"

pytestmark = pytest.mark.check


def test_a_short_run_keeps_every_figure(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--turns", "1", "--out", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, timeout=budget(100))
    kept = json.loads((tmp_path / "starts.json").read_text())
    (turn,) = kept["turns"]
    assert kept["summary"]["verify_imports"] == turn["verify_s"] / turn["import_s"] > 1
    assert turn["verify_s"] > turn["help_s"] > 0 and kept["about"]["cores"]
