"""An engine that another package brings: found by its entry point, proven like ours, and harmless when it is broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from budget import budget
from command import DIGITS
from other_package import installed
from samestep import engine
from samestep.errors import UserError
from samestep.launch.fork_client import SOCKETS

SOURCE = (Path(engine.__file__).parent / "engines" / "single.py").read_text()
# As engines were before ENGINE: a module with members.
MEMBERS = f"""
{SOURCE[: SOURCE.index("ENGINE = ")]}
from samestep.engine import Numerics

PURPOSE = "plain training"
NEEDS: tuple[str, ...] = ()
PROCESSES = "one"

def missing(devices): return None
def numerics(): return Numerics()
"""
MODULES = {
    "tiny_engine": SOURCE,
    "older_engine": MEMBERS,
    "misspelt_engine": MEMBERS + "def explains(error, job): return None\n",
    "unknown_engine": SOURCE.replace("purpose=", "purposes="),
    "broken_engine": "import no_such_module\n",
    "leaving_engine": "raise SystemExit('no licence')\n",
    "interrupting_engine": "def __getattr__(name): raise KeyboardInterrupt(name)\n",
    "empty_engine": "def train(job, world, run, *, size=1): ...\n",
}
POINTS = {name.partition("_")[0]: name for name in MODULES} | {"ddp": "broken_engine"}


def members(text: str) -> types.ModuleType:
    module = types.ModuleType("members")
    exec(text, vars(module))
    return module


def test_a_module_of_members_is_an_engine() -> None:
    made = engine.engine_of_members(members(f"{MEMBERS}CANNOT_SKIP = 'it is so'\ndef says_lost(error): return True\n"))
    assert (made.purpose, made.needs.processes, made.checks.cannot_skip) == ("plain training", "one", "it is so")
    assert made.checks.says_lost(ValueError()) and made.checks.explain(ValueError(), None) is None  # type: ignore[arg-type]
    assert made.checks.units is made.close is made.fragments is None


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("CANOT_SKIP = 'it is so'", "CANNOT_SKIP"),
        ("INSTAL = 'pip install it'", "INSTALL"),
        ("def fragment(model, world): pass", "fragments"),
        ("def say_lost(error): pass", "says_lost"),
        ("def closes(): pass", "close"),
    ],
)
def test_a_misspelt_member_is_an_error(wrong: str, meant: str) -> None:
    with pytest.raises(UserError, match=f"did you mean {meant}"):
        engine.engine_of_members(members(f"{MEMBERS}{wrong}\n"))
    engine.engine_of_members(members(f"{MEMBERS}{wrong.replace('def ', 'def _') if 'def' in wrong else '_' + wrong}\n"))


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """With a package installed that brings engines: a copy of `single`, also as a module of members, and with a
    misspelt member; one that does not import, one that exits, one that holds nothing; and one that is named as one of
    ours."""
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
    assert listed["older"]["available"]
    assert "PURPOSE" in why["empty"]
    assert "explains" in why["misspelt"] and " explain?" in why["misspelt"]
    assert "TypeError: " in why["unknown"] and "purposes" in why["unknown"]
    assert listed["ddp"]["available"]
    assert listed["samestep-tiny.ddp"]["reason"]["id"] == "engine_is_shadowed"
    wrong = samestep("verify", "digits", "--nproc", "2", "--set-engine", "ddp.compress=zip", "--json")
    assert (wrong.returncode, len(wrong.stderr.splitlines())) == (2, 1), wrong.stderr
    done = samestep("verify", *DIGITS, "--nproc", "2", "--engines", "tiny,older,misspelt,ddp", "--json")
    verdicts = {row["engine"]: row["verdict"] for row in json.loads(done.stdout)["engines"]}
    assert verdicts == {"tiny": "same", "older": "same", "misspelt": "unavailable", "ddp": "same"}, done.stderr
