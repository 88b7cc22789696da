"""Exit codes of errors and signals, each with one sentence on stderr."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import typer

from samestep.commands.cli import app
from samestep.commands.exit_codes import with_exit_code
from samestep.errors import Refused, TrainingFailed, UserError
from samestep.message import message
from samestep.report import language

ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU)
SIGNALS = (*ENDING, signal.SIGUSR1, signal.SIGUSR2)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Puts pytest's signal handlers back."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def code_of(command: Callable[[], int]) -> int:
    with pytest.raises((typer.Exit, SystemExit)) as ended:
        with_exit_code(command)()
    return int(ended.value.exit_code if isinstance(ended.value, typer.Exit) else ended.value.code or 0)


def raises(error: BaseException) -> Callable[[], int]:
    def command() -> int:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (UserError("a mistake"), 2, "samestep: a mistake\n"),
        (Refused("no such layer"), 2, "samestep: no such layer\n"),
        (TrainingFailed("rank 1 failed"), 1, "samestep: rank 1 failed\n"),
        (KeyboardInterrupt(), 130, "samestep: interrupted; everything that was started has ended\n"),
        *(
            (OSError(number, os.strerror(number), "a.json"), 2, f"a.json cannot be written ({os.strerror(number)})")
            for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
        ),
    ],
)
def test_an_error_is_a_code_and_a_sentence(
    error: BaseException, code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of(raises(error)) == code
    assert says in capsys.readouterr().err


def test_the_language_of_a_command_is_that_of_its_option(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (language.VARIABLE, *language.LOCALES):
        monkeypatch.setenv(name, "")
    said = message("stops_after_a_step_by_signal", signal="SIGTERM")
    for given in ("zh", "en"):
        with pytest.raises(typer.Exit):
            with_exit_code(raises(TrainingFailed(said)))(lang=given)
        assert capsys.readouterr().err == f"samestep: {language.text(said, given)}\n"  # type: ignore[arg-type]
    with pytest.raises(typer.Exit) as ended:
        with_exit_code(raises(TrainingFailed(said)))(lang="fr")
    assert ended.value.exit_code == 2 and "--lang=fr" in capsys.readouterr().err


def test_every_command_has_the_option_and_what_follows_a_script_is_the_scripts() -> None:
    commands = cast(Any, typer.main.get_command(app)).commands
    assert {name for name, command in commands.items() if "lang" not in {each.name for each in command.params}} == set()
    for name, words in (("check", "script"), ("monitor", "words")):
        parsed = commands[name].make_context(name, ["--lang", "zh", "train.py", "--lang", "fr"]).params
        assert parsed["lang"] == "zh" and [*parsed[words]] == ["train.py", "--lang", "fr"]


def test_other_errors_keep_their_traceback() -> None:
    with pytest.raises(FileNotFoundError):
        with_exit_code(raises(FileNotFoundError(errno.ENOENT, "no such file")))()


@pytest.mark.parametrize("number", ENDING)
def test_a_signal_ends_it_with_128_and_its_number(number: signal.Signals) -> None:
    """Another one while it ends what it has started changes nothing."""
    signal.signal(number, signal.SIG_DFL)  # as if these tests did not run under nohup
    ended = []

    def command() -> int:
        try:
            os.kill(os.getpid(), number)
        finally:
            os.kill(os.getpid(), number)
            ended.append(number)
        return 0

    assert code_of(command) == 128 + number
    assert ended == [number]


def test_under_nohup_a_hangup_is_ignored() -> None:
    def command() -> int:
        os.kill(os.getpid(), signal.SIGHUP)
        return 7

    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert code_of(command) == 7
