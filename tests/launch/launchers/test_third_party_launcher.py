"""A launcher that another package brings: found by its entry point, and used like ours."""

from __future__ import annotations

import signal
import types
from pathlib import Path

import pytest

from command import samestep
from launch.test_endings import assert_gone, training
from other_package import installed
from samestep.errors import UserError
from samestep.launch import GROUP, launcher_of_members
from samestep.launch.launchers import torchrun

LOUD = """
from dataclasses import replace
from samestep.launch.launchers import spawn

def loud(program, shape):
    quiet = spawn.plan(program, shape)
    return replace(quiet, env={**quiet.env, "LOUD": "very"})

LAUNCHER = replace(spawn.LAUNCHER, plan=loud)
"""
# As launchers were before LAUNCHER: a module with members.
MEMBERS = """
from samestep.launch.launchers import spawn, torchrun
from samestep.launch.launchers.spawn import missing, plan
from samestep.world import RankVariables

STARTS = ("group",)
VARIABLES = RankVariables()
KILLED, EXITED = torchrun.REPORT.killed, torchrun.REPORT.exited
MORE_RANKS = 8
"""
NO_SIGNALS = MEMBERS + "GETS_NO_SIGNALS = ONE_MACHINE = True\n"

# It raises when it is asked whether it is available.
ASKED = """
from dataclasses import replace
from samestep.launch.launchers import spawn

def missing(machines, env): raise KeyboardInterrupt("when asked")
LAUNCHER = replace(spawn.LAUNCHER, missing=missing)
"""


@pytest.mark.check
def test_another_packages_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", installed(tmp_path, GROUP, {"loud_launcher": LOUD}, {"loud": "loud_launcher"}))
    asked = ["digits", "--engine", "ddp", "--launcher", "loud"]
    assert "LOUD=very " in samestep("run", *asked, "--dry-run", out=tmp_path / "dry").stdout
    done = samestep("verify", *asked, "--nproc", "2", out=tmp_path / "out")
    assert done.returncode == 0, done.stderr
    (row,) = [line.split() for line in done.stdout.splitlines() if line.startswith("ddp ")]
    assert row[1:4] == ["loud", "same", "step"]
    assert len(list((tmp_path / "out" / "launches" / "ddp-loud-0").glob("rank[01].json"))) == 2


@pytest.mark.full
def test_where_ranks_get_no_signals_one_interrupt_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = {"quiet_launcher": NO_SIGNALS}
    monkeypatch.setenv("PYTHONPATH", installed(tmp_path, GROUP, launcher, {"quiet": "quiet_launcher"}))
    with training("hangs_on_rank_1", tmp_path / "out", "quiet") as run:
        run.parent.send_signal(signal.SIGINT)
        assert run.ends() == 130
        assert "interrupt again" not in run.said()
        assert_gone(run.pids)


def member(text: str) -> types.ModuleType:
    module = types.ModuleType("members")
    exec(text, vars(module))
    return module


def test_a_module_of_members_is_a_launcher() -> None:
    launcher = launcher_of_members(member(NO_SIGNALS))
    assert (launcher.starts, launcher.one_machine, launcher.gets_signals) == (("group",), True, False)
    assert launcher.report == torchrun.REPORT and launcher.environment is None and launcher.scheduler is None
    names = ("launched_size", "identity", "init_method", "node_rank", "rendezvous_host", "allocated_nodes", "end")
    text = "".join(f"def {name}(*args): return {name!r}\n" for name in (*names, "allocated_ranks"))
    launcher = launcher_of_members(member(MEMBERS + text + "PREFIX, WHERE = 'LOUD_', 'in a job'\n"))
    assert launcher.environment and launcher.environment.node_rank and launcher.scheduler
    assert launcher.environment.rendezvous_host({}) == "rendezvous_host" and launcher.environment.prefix == "LOUD_"
    assert launcher.scheduler.allocated_ranks({}) == "allocated_ranks" and launcher.scheduler.where == "in a job"  # type: ignore[comparison-overlap]


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("ONE_MACHIN = True", "ONE_MACHINE"),
        ("GET_NO_SIGNALS = True", "GETS_NO_SIGNALS"),
        ("Prefix = 'LOUD_'", "PREFIX"),
        ("def launched_sise(env): pass", "launched_size"),
        ("def node_ranks(env, nnodes): pass", "node_rank"),
    ],
)
def test_a_misspelt_member_is_an_error(wrong: str, meant: str) -> None:
    with pytest.raises(UserError, match=f"did you mean {meant}"):
        launcher_of_members(member(f"{MEMBERS}{wrong}\n"))
    launcher_of_members(member(MEMBERS + wrong.replace("def ", "def _") if "def" in wrong else f"{MEMBERS}_{wrong}\n"))


BROKEN = {
    "absent": ("import no_such_module", "ModuleNotFoundError"),
    "leaving": ("raise SystemExit('no licence')", "SystemExit: no licence"),
    "interrupting": ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    "interrupted": ("def __getattr__(name): raise KeyboardInterrupt(name)", "KeyboardInterrupt: LAUNCHER"),
    "asked": (ASKED, "KeyboardInterrupt: when asked"),
    "empty": ("STARTS = ('group',)", "has no VARIABLES"),
    "misspelt": (MEMBERS + "ONE_MACHIN = True", "ONE_MACHINE"),
    "unknown": (LOUD + "LAUNCHER = replace(LAUNCHER, one_machin=True)", "one_machin"),
}


@pytest.mark.check
def test_a_broken_launcher_breaks_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {f"{name}_launcher": text for name, (text, _) in BROKEN.items()}
    points = {name: f"{name}_launcher" for name in BROKEN}
    monkeypatch.setenv("PYTHONPATH", installed(tmp_path, GROUP, modules, points))
    assert samestep("run", "digits", "--dry-run", out=tmp_path / "dry").returncode == 0
    for name, (_, says) in BROKEN.items():
        done = samestep("verify", "digits", "--engine", "ddp", "--launcher", name)
        assert done.returncode == 2 and f"'{name}'" in done.stderr, done.stderr
        assert says in done.stderr and "Traceback" not in done.stderr
