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
    "unknown_engine": SOURCE.replace("purpose=", "purposes="),
    "broken_engine": "import no_such_module\n",
    "leaving_engine": "raise SystemExit('no licence')\n",
    "interrupting_engine": "def __getattr__(name): raise KeyboardInterrupt(name)\n",
    "empty_engine": "def train(job, world, run, *, size=1): ...\n",
}
POINTS = {name.partition("_")[0]: name for name in MODULES} | {"ddp": "broken_engine"}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """With a package installed that brings engines: a copy of `single`, also with a misspelt field; one that does not
    import, one that exits, one without an ENGINE; and one that is named as one of ours."""
    fresh = {name: value for name, value in os.environ.items() if name != SOCKETS}  # processes that see the package
    return {**fresh, "PYTHONPATH": installed(tmp_path, engine.GROUP, MODULES, POINTS)}


@pytest.mark.check
def test_another_packages_engine(environment: dict[str, str], tmp_path: Path) -> None:
    def samestep(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "samestep", *arguments]
        quiet = {"env": environment, "capture_output": True, "text": True, "cwd": tmp_path}
        return subprocess.run(command, timeout=budget(150), **quiet)

    listed = {row["name"]: row for row in json.loads(samestep("engines", "--json").stdout)["engines"]}
    assert listed["tiny"]["available"]
    why = {name: row["reason"]["english"] for name, row in listed.items() if row["reason"]}
    assert "'no_such_module'" in why["broken"]
    assert "SystemExit: no licence" in why["leaving"]
    assert "KeyboardInterrupt: ENGINE" in why["interrupting"]
    assert listed["empty"]["reason"]["fields"]["why"]["id"] == "plug_in_declares_none"
    assert "TypeError: " in why["unknown"] and "purposes" in why["unknown"]
    assert listed["ddp"]["available"]
    assert listed["samestep-tiny.ddp"]["reason"]["id"] == "engine_is_shadowed"
    wrong = samestep("verify", "digits", "--nproc", "2", "--set-engine", "ddp.compress=zip", "--json")
    assert (wrong.returncode, len(wrong.stderr.splitlines())) == (2, 1), wrong.stderr
    done = samestep("verify", *DIGITS, "--nproc", "2", "--engines", "tiny,unknown,ddp", "--json")
    verdicts = {row["engine"]: row["verdict"] for row in json.loads(done.stdout)["engines"]}
    assert verdicts == {"tiny": "same", "unknown": "unavailable", "ddp": "same"}, done.stderr
