"""Requests to stop: which signals are one, what the ranks are sent, and what a second interrupt does."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from samestep.launch import stop_requests
from samestep.launch.stop_requests import StopRequests
from samestep.records.record import Progress, write_progress

TRAINING = Progress(done=3)


class Ended(Exception):
    """What the handler that was there before does."""


def end(number: int, frame: object) -> None:
    raise Ended


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The signals that the ranks are sent. The process's own handlers raise Ended."""
    numbers: list[int] = []
    monkeypatch.setattr(stop_requests, "signal_ranks", lambda _, number: numbers.append(number))
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.signal(number, end) for number in signals}
    yield numbers
    assert {signal.getsignal(number) for number in signals} == {end}  # close() has put them back
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_the_ranks_are_sent_one_signal_and_again_after_a_restart(
    number: int, sent: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_progress(0, tmp_path, TRAINING)
    with closing(StopRequests(tmp_path, accepted=True, terminates=True)) as requests:
        requests.forward(TRAINING)
        assert sent == []
        os.kill(os.getpid(), number)
        requests.forward(Progress())  # the ranks that have been restarted do not train yet
        assert sent == []
        requests.forward(TRAINING)
        requests.forward(TRAINING)
        assert sent == [signal.SIGUSR2]
        requests.forward(Progress(done=0, attempt=1))
        assert sent == [signal.SIGUSR2] * 2
    assert capsys.readouterr().err.count("stopping after a step") == 1


def test_a_second_interrupt_ends_the_launch(sent: list[int], tmp_path: Path) -> None:
    write_progress(0, tmp_path, TRAINING)
    with closing(StopRequests(tmp_path, accepted=True)):
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(Ended):
            os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_before_the_training_ends_the_launch(sent: list[int], tmp_path: Path) -> None:
    with closing(StopRequests(tmp_path, accepted=True)), pytest.raises(Ended):
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("accepted", [True, False])
def test_sigterm_is_a_request_only_where_it_is_asked_to_be(accepted: bool, sent: list[int], tmp_path: Path) -> None:
    write_progress(0, tmp_path, TRAINING)
    with closing(StopRequests(tmp_path, accepted=accepted, terminates=not accepted)), pytest.raises(Ended):
        os.kill(os.getpid(), signal.SIGTERM)
