"""Wrong words on the command line, in this process: whatever is wrong is one sentence, and exit code 2."""

from __future__ import annotations

import errno
import inspect
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.models import OptionInfo

from samestep.commands import cli, results_folder
from samestep.commands.exit_codes import with_exit_code
from samestep.commands.grouped_help import GROUP_OF_FLAG
from samestep.commands.options import path
from samestep.errors import UserError
from samestep.records.runs import ResultsIdentity

WORDS = {"evaluate": ["--weights", "w"], "check": ["s.py"], "monitor": ["true"], "diff": ["a", "b"]}
NUMBERS: dict[Any, Sequence[str]] = {
    int: ("abc", "", "1.5", "-1", "9" * 30),
    float: ("abc", "", "nan", "inf", "-1", "1e400"),
}
PATHS = ("--out", "--init", "--export", "--predictions")


def said(words: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Runs a command in this process. Returns its exit code and what is on stderr."""
    monkeypatch.setattr(sys, "argv", ["samestep", *words])
    for name in ("stdout", "stderr"):  # which the command replaces
        monkeypatch.setattr(sys, name, getattr(sys, name))
    with pytest.raises(SystemExit) as ended:
        cli.main()
    code = ended.value.code
    assert isinstance(code, int)
    return code, capfd.readouterr().err


def options() -> Iterator[tuple[str, str, Any]]:
    """Yields each command with each of its options' flags and types."""
    for registered in cli.app.registered_commands:
        assert registered.callback
        for parameter in inspect.signature(registered.callback, eval_str=True).parameters.values():
            kind, info = parameter.annotation.__origin__, parameter.annotation.__metadata__[0]
            flag = info.default if isinstance(info.default, str) else f"--{parameter.name.replace('_', '-')}"
            if isinstance(info, OptionInfo):
                yield registered.name or registered.callback.__name__, flag, kind


def test_every_number_is_refused_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    tried = 0
    for command, flag, kind in {flag: (command, flag, kind) for command, flag, kind in options()}.values():
        for plain, values in NUMBERS.items():
            for value in values if kind in (plain, plain | None) else ():
                code, error = said([command, f"{flag}={value}", *WORDS.get(command, [])], monkeypatch, capfd)
                assert (code, error.count("\n"), flag in error) == (2, 1, True), (command, flag, value, error)
                assert error.startswith("samestep: ")
                tried += 1
    assert tried > 100
    assert list(tmp_path.iterdir()) == []


def test_every_path_that_no_file_can_have_is_refused_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    chosen = [(command, flag) for command, flag, _ in options() if flag in PATHS]
    assert len(chosen) > 9
    for command, flag in chosen:
        for value in ("", "x" * 300, "y" * 5000, "~no_such_user/out"):
            code, error = said([command, f"{flag}={value}", *WORDS.get(command, [])], monkeypatch, capfd)
            assert (code, error.count("\n"), flag in error) == (2, 1, True), (command, flag, value, error)
            assert len(error) < 300
    for words in (["run", ""], ["runs", ""], ["runs", "x" * 300], ["diff", "", "a"], ["check", "y" * 5000]):
        code, error = said(words, monkeypatch, capfd)
        assert (code, error.count("\n")) == (2, 1), (words, error)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [["nope"], ["--nope"], ["run", "--nope"], ["engines", "extra"], ["check"], ["diff"]])
def test_a_line_that_is_wrong_as_a_whole(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code, error = said(words, monkeypatch, capfd)
    assert (code, error.count("\n"), error.startswith("samestep: "), "--help`" in error) == (2, 1, True, True)


def test_help_is_no_mistake(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    for words in (["--help"], ["run", "--help"]):
        assert said(words, monkeypatch, capfd) == (0, "")


def test_the_help_of_each_command_is_one_screen_and_has_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    flags = sorted({(command, flag.partition("/")[0]) for command, flag, _ in options()})
    for command in {command for command, _ in flags}:
        cli.app([command, "--help"], standalone_mode=False)
        page = capsys.readouterr().out
        cli.app([command, "--help-all"], standalone_mode=False)
        complete = capsys.readouterr().out
        assert page.count("\n") <= 40, command
        for flag in (flag for name, flag in flags if name == command):
            assert f"{flag} " in page.replace("\n", " ").replace(",", " "), (command, flag)
            assert f"  {flag}" in complete or f", {flag}" in complete, (command, flag)
    assert set(GROUP_OF_FLAG) <= {flag for _, flag in flags}


def test_a_home_folder_is_found_where_no_shell_expands_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert path("~/out", "--out") == tmp_path / "out"
    assert path("./~", "--out") == Path("./~")
    assert path("a b\n", "--out") == Path("a b\n")  # odd, and a name


def test_a_current_folder_that_is_gone(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    code, error = said(["runs"], monkeypatch, capfd)
    assert (code, error.count("\n"), "current folder" in error) == (2, 1, True)


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EMFILE, "ulimit -n"),
        (errno.EAGAIN, "ulimit -u"),
        (errno.EFBIG, "ulimit -f"),
        (errno.EACCES, "read and write"),
    ],
)
def test_an_error_of_the_machine_is_a_sentence_with_its_remedy(
    number: int, remedy: str, capfd: pytest.CaptureFixture[str]
) -> None:
    def command() -> int:
        raise OSError(number, os.strerror(number), "/a/file")

    with pytest.raises(typer.Exit) as ended:
        with_exit_code(command)()
    error = capfd.readouterr().err
    assert (ended.value.exit_code, error.count("\n")) == (2, 1)
    assert "/a/file" in error and remedy in error


def test_a_refused_command_leaves_no_folder(tmp_path: Path) -> None:
    study = ResultsIdentity("run", "a", "0", 1)
    unused, used, old = tmp_path / "new" / "unused", tmp_path / "used", tmp_path / "old"
    old.mkdir()
    for folder in (unused, used, old):
        results_folder.prepare(folder, study)
    (used / "rank0.log").write_text("a line")
    results_folder.remove_unused_folders()
    results_folder.release_folders()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["old", "used"]
    assert (used / "study.json").exists() and (old / "study.json").exists()


def test_a_dry_run_creates_no_folder_and_sees_what_is_there(tmp_path: Path) -> None:
    study, out = ResultsIdentity("run", "a", "0", 1), tmp_path / "out"
    assert results_folder.prepare(out, study, dry_run=True) == out
    assert list(tmp_path.iterdir()) == []
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match=r"not samestep's"):
        results_folder.prepare(out, study, dry_run=True)
    assert [entry.name for entry in out.iterdir()] == ["thesis.txt"]
