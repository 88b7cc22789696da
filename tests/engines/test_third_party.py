"""An engine that another package brings: found by its entry point, proven like ours, and harmless when it is broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from budget import budget
from command import DIGITS
from other_package import installed
from samestep import engine
from samestep.launch.fork_client import SOCKETS

SOURCE = (Path(engine.__file__).parent / "engines" / "single.py").read_text()
MODULES = {
    "tiny_engine": SOURCE,
    "broken_engine": "import no_such_module\n",
    "leaving_engine": "raise SystemExit('no licence')\n",
    "empty_engine": "def train(job, world, run, *, size=1): ...\n",
}
POINTS = {name.partition("_")[0]: name for name in MODULES} | {"ddp": "broken_engine"}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """With a package installed that brings engines: a copy of `single`; one that does not import, one that exits, one
    that holds nothing; and one that is named as one of ours."""
    fresh = {name: value for name, value in os.environ.items() if name != SOCKETS}  # processes that see the package
    return {**fresh, "PYTHONPATH": installed(tmp_path, engine.GROUP, MODULES, POINTS)}


def test_another_packages_engine(environment: dict[str, str], tmp_path: Path) -> None:
    def samestep(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "samestep", *arguments]
        quiet = {"env": environment, "capture_output": True, "text": True, "cwd": tmp_path}
        return subprocess.run(command, timeout=budget(150), **quiet)

    listed = {row["name"]: row for row in json.loads(samestep("engines", "--json").stdout)["engines"]}
    assert listed["tiny"]["available"]
    assert (
        listed["broken"]["reason"]["english"]
        == "does not import: ModuleNotFoundError: No module named 'no_such_module'"
    )
    assert listed["leaving"]["reason"]["english"] == "does not import: SystemExit: no licence"
    assert listed["empty"]["reason"]["english"].startswith("does not answer: AttributeError: ")
    assert listed["ddp"]["available"]
    assert listed["samestep-tiny.ddp"]["reason"]["english"] == "samestep has an engine of this name itself"
    wrong = samestep("verify", "digits", "--nproc", "2", "--set-engine", "ddp.compress=zip", "--json")
    assert (wrong.returncode, len(wrong.stderr.splitlines())) == (2, 1), wrong.stderr
    done = samestep("verify", *DIGITS, "--nproc", "2", "--engines", "tiny,broken,ddp", "--json")
    verdicts = {row["engine"]: row["verdict"] for row in json.loads(done.stdout)["engines"]}
    assert verdicts == {"tiny": "same", "broken": "unavailable", "ddp": "same"}, done.stderr
