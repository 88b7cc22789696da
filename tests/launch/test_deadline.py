"""A launch's deadline: when it is over, and what is done then."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from launch.clock import Clock
from samestep.errors import TrainingFailed
from samestep.launch import end, stacks
from samestep.launch.end import Deadline
from samestep.message import message


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(end, "time", clock)
    return clock


def test_it_is_over_after_its_seconds(clock: Clock, tmp_path: Path) -> None:
    limit = Deadline(10.0, tmp_path)
    clock.sleep(10.0)
    assert not limit.is_over()
    clock.sleep(0.1)
    assert limit.is_over()


def test_without_seconds_it_is_never_over(clock: Clock, tmp_path: Path) -> None:
    limit = Deadline(None, tmp_path)
    clock.sleep(1e9)
    assert not limit.is_over()


@pytest.mark.parametrize("writes_at", [(100.5,), (100.5, 101.5), (101.5, 100.5), (100.5, None), (None,)])
def test_the_ranks_have_time_to_write_their_stacks(
    writes_at: tuple[float | None, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None: a rank that does not answer, for which the others' stacks do not wait long."""
    files = [tmp_path / f"stack-rank{rank}.txt" for rank in range(len(writes_at))]
    for file in files:
        file.touch()

    class Ranks(Clock):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            for file, at in zip(files, writes_at, strict=True):
                if at and self.now >= at and not file.stat().st_size:
                    file.write_text("Stack (most recent call first)")

    clock, sent = Ranks(), []
    monkeypatch.setattr(stacks, "time", clock)
    monkeypatch.setattr(end, "signal_ranks", lambda folder, number: sent.append((folder, number, clock.now)))
    with pytest.raises(TrainingFailed) as failed:
        Deadline(10.0, tmp_path).fail()
    assert failed.value.message == message("launch_reached_its_deadline", seconds=10.0, folder=tmp_path)
    assert sent == [(tmp_path, signal.SIGUSR1, 100.0)]
    answered = [at + stacks.SETTLE_S for at in writes_at if at]
    until = max(answered) if len(answered) == len(files) else 100.0 + stacks.WAIT_S
    assert until <= clock.now <= until + 0.05
