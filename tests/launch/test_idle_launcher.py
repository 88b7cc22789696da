"""A launcher whose ranks have ended: how long it may still run, and when restarting them is in vain."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest

from launch.clock import Clock
from samestep.launch import Machines, end
from samestep.launch.end import ENDING_S, SETTLE_S, IdleLauncher
from samestep.message import as_said
from samestep.records.files import write
from samestep.records.record import RankError

ONE, RESTARTED = Machines(), Machines(max_restarts=3, timeout_s=60.0)
TWO = Machines(nnodes=2, master="h0", timeout_s=60.0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(end, "time", clock)
    return clock


@pytest.fixture(scope="module")
def ended() -> int:
    """The pid of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def ranks(folder: Path, *pids: int, recorded: bool = False) -> None:
    """Writes the pid files of ranks on this machine, and their records where they have ended well."""
    for rank, pid in enumerate(pids):
        (folder / f"pid-rank{rank}").write_text(f"{pid}@{socket.gethostname()}")
        if recorded:
            (folder / f"rank{rank}.json").touch()


def test_a_launcher_whose_ranks_start_or_live_is_not_stuck(clock: Clock, ended: int, tmp_path: Path) -> None:
    idle = IdleLauncher(tmp_path, ONE)
    for pids in ((), (os.getpid(), ended)):
        ranks(tmp_path, *pids)
        assert not idle.is_stuck()
        clock.sleep(1e6)
        assert not idle.is_stuck()


@pytest.mark.parametrize(
    ("machines", "recorded", "limit_s"),
    [
        (ONE, True, ENDING_S),
        (ONE, False, SETTLE_S),
        (TWO, True, 60.0),  # other machines' ranks may still train
        (TWO, False, SETTLE_S),
        (RESTARTED, False, 60.0),
    ],
)
def test_a_launcher_without_live_ranks_has_a_limit(
    machines: Machines, recorded: bool, limit_s: float, clock: Clock, ended: int, tmp_path: Path
) -> None:
    ranks(tmp_path, ended, ended, recorded=recorded)
    idle = IdleLauncher(tmp_path, machines)
    assert not idle.is_stuck()  # the limit begins here
    clock.sleep(limit_s)
    assert not idle.is_stuck()
    clock.sleep(0.1)
    assert idle.is_stuck()


def test_a_restarted_rank_ends_the_wait(clock: Clock, ended: int, tmp_path: Path) -> None:
    ranks(tmp_path, ended)
    idle = IdleLauncher(tmp_path, RESTARTED)
    assert not idle.is_stuck()
    clock.sleep(59.0)
    ranks(tmp_path, os.getpid())
    assert not idle.is_stuck()
    ranks(tmp_path, ended)
    assert not idle.is_stuck()
    clock.sleep(59.0)
    assert not idle.is_stuck()


@pytest.mark.parametrize(
    ("machines", "kind", "stuck"),
    [
        (RESTARTED, "user", True),
        (RESTARTED, "refused", True),
        (RESTARTED, "crash", False),
        (ONE, "user", False),  # the launcher ends by itself
        (Machines(nnodes=2, master="h0", max_restarts=3), "user", False),  # the other machines' would wait
    ],
)
def test_a_mistake_of_the_users_is_not_restarted(
    machines: Machines, kind: str, stuck: bool, clock: Clock, tmp_path: Path
) -> None:
    ranks(tmp_path, os.getpid())
    write(tmp_path / "error-rank0.json", RankError(0, kind, as_said("why"), 0.0, "", False))
    assert IdleLauncher(tmp_path, machines).is_stuck() == stuck
