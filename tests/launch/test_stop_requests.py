"""Requests to stop: which signals are one, what the ranks are sent, and what a second interrupt does."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path

import pytest

from samestep.launch import supervise
from samestep.launch.supervise import REPEATED, REQUESTS, SCHEDULERS, StopRequests
from samestep.records.record import Progress, write_progress

TRAINING = Progress(done=3)
SIGNALS = tuple(getattr(signal, name) for name in REQUESTS)


class Ended(Exception):
    """What the handler that was there before does."""


RAISES = pytest.raises(Ended)


def end(number: int, frame: object) -> None:
    raise Ended


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The signals that the ranks are sent. The process's own handlers raise Ended."""
    numbers: list[int] = []
    monkeypatch.setattr(supervise, "signal_ranks", lambda _, number: numbers.append(number))
    before = {number: signal.signal(number, end) for number in SIGNALS}
    yield numbers
    assert {signal.getsignal(number) for number in SIGNALS} == {end}  # close() has put them back
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_ranks_are_sent_one_signal_and_again_after_a_restart(
    number: int, sent: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two at once are one request: `timeout` sends two, and so does a terminal that goes."""
    write_progress(0, tmp_path, TRAINING)
    with closing(StopRequests(tmp_path, accepted=True)) as requests:
        requests.forward(TRAINING)
        assert sent == []
        for _ in range(2):
            os.kill(os.getpid(), number)
        requests.forward(Progress())  # the ranks that have been restarted do not train yet
        assert sent == []
        requests.forward(TRAINING)
        requests.forward(TRAINING)
        assert sent == [signal.SIGUSR2]
        requests.forward(Progress(done=0, attempt=1))
        assert sent == [signal.SIGUSR2] * 2
    assert capsys.readouterr().err.count("samestep: ") == 1


@pytest.mark.parametrize("number", SIGNALS)
def test_once_more_a_users_signal_ends_the_launch(number: signal.Signals, sent: list[int], tmp_path: Path) -> None:
    write_progress(0, tmp_path, TRAINING)
    with closing(StopRequests(tmp_path, accepted=True)) as requests:
        os.kill(os.getpid(), number)
        requests.forward(TRAINING)
        with nullcontext() if number.name in REPEATED else pytest.raises(Ended):
            os.kill(os.getpid(), number)
    with closing(StopRequests(tmp_path, accepted=True)), nullcontext() if number.name in REPEATED else RAISES:
        for _ in range(3):  # the sentence has not come
            os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", SIGNALS)
def test_before_the_training_it_ends_the_launch_or_waits(
    number: signal.Signals, sent: list[int], tmp_path: Path
) -> None:
    with closing(StopRequests(tmp_path, accepted=True)) as requests:
        with nullcontext() if number.name in SCHEDULERS else pytest.raises(Ended):
            os.kill(os.getpid(), number)
        requests.forward(TRAINING)
        assert sent == [signal.SIGUSR2] * (number.name in SCHEDULERS)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("accepted", [True, False])
def test_what_ends_a_launch_is_no_request(accepted: bool, number: int, sent: list[int], tmp_path: Path) -> None:
    write_progress(0, tmp_path, TRAINING)
    ends_by = (signal.SIGTERM, signal.SIGHUP) if accepted else ()
    with closing(StopRequests(tmp_path, accepted=accepted, ends_by=ends_by)), pytest.raises(Ended):
        os.kill(os.getpid(), number)


def test_under_nohup_a_hangup_stays_ignored(sent: list[int], tmp_path: Path) -> None:
    write_progress(0, tmp_path, TRAINING)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with closing(StopRequests(tmp_path, accepted=True)) as requests:
        os.kill(os.getpid(), signal.SIGHUP)
        requests.forward(TRAINING)
    assert sent == [] and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    signal.signal(signal.SIGHUP, end)


def test_without_a_handler_before_it_is_a_request_too(sent: list[int], tmp_path: Path) -> None:
    """As in a script that calls samestep.run: SIGTERM would end it at once."""
    write_progress(0, tmp_path, TRAINING)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with closing(StopRequests(tmp_path, accepted=True)) as requests:
        os.kill(os.getpid(), signal.SIGTERM)
        requests.forward(TRAINING)
    assert sent == [signal.SIGUSR2]
    signal.signal(signal.SIGTERM, end)
