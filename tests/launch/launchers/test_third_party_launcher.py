"""A launcher that another package brings: found by its entry point, and used like ours."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from command import samestep
from launch.test_endings import assert_gone, training
from other_package import installed
from samestep.launch import GROUP

LOUD = """
from dataclasses import replace
from samestep.launch.launchers import spawn

def loud(program, shape):
    quiet = spawn.plan(program, shape)
    return replace(quiet, env={**quiet.env, "LOUD": "very"})

LAUNCHER = replace(spawn.LAUNCHER, plan=loud)
"""
QUIET = """
from dataclasses import replace
from samestep.launch.launchers import spawn

LAUNCHER = replace(spawn.LAUNCHER, gets_signals=False)
"""
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
    launcher = {"quiet_launcher": QUIET}
    monkeypatch.setenv("PYTHONPATH", installed(tmp_path, GROUP, launcher, {"quiet": "quiet_launcher"}))
    with training("hangs_on_rank_1", tmp_path / "out", "quiet") as run:
        run.parent.send_signal(signal.SIGINT)
        assert run.ends() == 130
        assert "interrupt again" not in run.said()
        assert_gone(run.pids)


BROKEN = {
    "absent": ("import no_such_module", "ModuleNotFoundError"),
    "leaving": ("raise SystemExit('no licence')", "SystemExit: no licence"),
    "interrupting": ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    "interrupted": ("def __getattr__(name): raise KeyboardInterrupt(name)", "KeyboardInterrupt: LAUNCHER"),
    "asked": (ASKED, "KeyboardInterrupt: when asked"),
    "empty": ("STARTS = ('group',)", "its LAUNCHER is no Launcher"),
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
