"""An engine that another package brings: found by its entry point, proven like ours, and harmless when it is broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from samestep.launch.fork_client import SOCKETS

SOURCE = Path(__file__).parents[2] / "src" / "samestep" / "engines" / "single.py"
SETUP = """
from setuptools import setup
setup(name="samestep-tiny", version="1.0",
      py_modules=["tiny_engine", "broken_engine", "leaving_engine", "empty_engine"],
      entry_points={"samestep.engines": ["tiny = tiny_engine", "broken = broken_engine", "leaving = leaving_engine",
                                         "empty = empty_engine", "ddp = broken_engine"]})
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """With a tiny package installed that brings engines: a copy of `single`; one that does not import, one that exits,
    one that holds nothing; and one that is named as one of ours."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "setup.py").write_text(SETUP)
    (package / "tiny_engine.py").write_text(SOURCE.read_text())
    (package / "broken_engine.py").write_text("import no_such_module\n")
    (package / "leaving_engine.py").write_text("raise SystemExit('no licence')\n")
    (package / "empty_engine.py").write_text("def train(job, world, run, *, size=1): ...\n")
    target = tmp_path / "installed"
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(target)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(package)], check=True, timeout=120)
    fresh = {name: value for name, value in os.environ.items() if name != SOCKETS}  # processes that see the package
    return {**fresh, "PYTHONPATH": f"{target}:{SOURCE.parents[2]}"}


def test_another_packages_engine(environment: dict[str, str], tmp_path: Path) -> None:
    def samestep(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "samestep", *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180, cwd=tmp_path)

    listed = {row["name"]: row for row in json.loads(samestep("engines", "--json").stdout)}
    assert listed["tiny"]["available"]
    assert listed["broken"]["reason"] == "does not import: ModuleNotFoundError: No module named 'no_such_module'"
    assert listed["leaving"]["reason"] == "does not import: SystemExit: no licence"
    assert listed["empty"]["reason"].startswith("does not answer: AttributeError: ")
    assert listed["ddp"]["available"]
    assert listed["samestep-tiny.ddp"]["reason"] == "its name is that of an engine of samestep's"
    wrong = samestep("verify", "digits", "--nproc", "2", "--set-engine", "ddp.compress=zip", "--json")
    assert (wrong.returncode, len(wrong.stderr.splitlines())) == (2, 1), wrong.stderr
    done = samestep("verify", "digits", "--nproc", "2", "--engines", "tiny,broken,ddp", "--json")
    verdicts = {row["engine"]: row["verdict"] for row in json.loads(done.stdout)["engines"]}
    assert verdicts == {"tiny": "same", "broken": "unavailable", "ddp": "same"}, done.stderr
