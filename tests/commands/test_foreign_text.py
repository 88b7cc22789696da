"""Text of others at each place where it leaves samestep: it is shown, acts on nothing, and has an end."""

from __future__ import annotations

import csv
import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.progress import Progress, TextColumn
from rich.text import Text

from samestep.commands import progress
from samestep.commands.doctor import show_report
from samestep.commands.results_folder import recorded
from samestep.commands.runs import runs
from samestep.doctor.probe import Finding as Diagnosis
from samestep.doctor.records import Report
from samestep.errors import LONGEST_MESSAGE, TrainingFailed, say
from samestep.message import as_said
from samestep.rank.listeners import heading
from samestep.records.files import read, replace_text, write
from samestep.records.findings import DiffResults, Finding
from samestep.records.results import Divergence
from samestep.records.runs import COMMAND, CommandRecord, PastRun
from samestep.report.check import show_diff
from samestep.report.html_pages import template
from samestep.report.terminal import Terminal
from samestep.worker import rank_error

# A colour, the screen cleared, a title, a line of its own, another direction, no character, markup, a link.
TEXT = "x\x1b[31m\x1b[2J\x1b]0;t\x07\nrm -rf ~\r\u202egnp\ud800\x9b2J[bold]b[/bold][link=file:///etc]l[/link]$a$=1+1"
ACTING = ("\x1b", "\x07", "\r", "\u202e", "\ud800", "\x9b", "\nrm")


def check(shown: str) -> None:
    assert not [acting for acting in ACTING if acting in shown]
    assert "rm -rf" in shown and "[bold]" in shown.replace("\n", "").replace(" ", "")
    shown.encode()


def past(text: str) -> PastRun:
    return PastRun(text.replace("/", ""), "run", text, (text,), 1, "failed", reason=text, line=text, checkpoint=text)


def judged(text: str) -> Report:
    finding = Diagnosis("FAIL", as_said(text), text, machine=text, probe=text)
    return Report((text, "b"), (finding,), 1.0)


def differing(text: str) -> DiffResults:
    first = Divergence("adam", 1, "weight", text, 0, 1.0, 2.0, as_said(text))
    found = Finding("rows", "differs", as_said(text), first)
    return DiffResults(text, text, 1, "differs", [found], first, [as_said(text)])


EXITS: dict[str, Callable[[str], object]] = {
    "say": say,
    "runs": lambda text: progress.show_runs([past(text)]),
    "doctor": lambda text: show_report(judged(text)),
    "diff": lambda text: show_diff(differing(text)),
    "a table": lambda text: Terminal(width=200).print(Text(text)),
    "a line": lambda text: Terminal(width=200).show_line(text),
    "a figure": lambda text: progress._print(as_said(text)),
}


@pytest.mark.parametrize("name", EXITS)
def test_text_that_is_printed_acts_on_nothing(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    EXITS[name](TEXT)
    captured = capsys.readouterr()
    shown = captured.out + captured.err
    check(shown.replace("\n", "") if name in ("say", "a table") else shown)  # texts of several lines


@pytest.mark.parametrize("name", sorted({*EXITS} - {"a table"}))
def test_text_that_is_printed_has_an_end(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    EXITS[name]("x" * 10**6)
    captured = capsys.readouterr()
    assert len(captured.out + captured.err) < 4 * LONGEST_MESSAGE


def test_a_rank_s_line_keeps_its_colours_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank0.log").write_bytes(b"\x1b[31mred\x1b[0m\x1b[2J\xff\x9b\x07 end\n" + b"y" * 10**6 + b"\n")
    live = progress.Training("[red]job[/red]", tmp_path, "spawn")
    live.console = Terminal(stderr=True, force_terminal=True, color_system="standard", width=80)
    live.lines.print_new(last=True)
    shown = capsys.readouterr().err
    assert "\x1b[31mred" in shown and "\x1b[2J" not in shown and "\x07" not in shown and "end" in shown
    assert len(shown) < LONGEST_MESSAGE
    live._event(as_said("[bold]\nrm"))
    assert capsys.readouterr().err == "samestep: [red]job[/red]: [bold]\\nrm\n"


def test_a_bar_s_description_is_text() -> None:
    live = progress.Launches()
    columns = [column for column in live.progress.columns if isinstance(column, TextColumn)]
    assert isinstance(live.progress, Progress) and not any(
        column.markup for column in columns if "task" in column.text_format
    )


def test_a_page_shows_text_as_text(tmp_path: Path) -> None:
    page = template("monitor.html.j2").environment.from_string("<p>{{ text }}</p>").render(text=f"<script>{TEXT}")
    assert "&lt;script&gt;" in page and "<script>" not in page
    assert not [acting for acting in ACTING if acting in page and acting != "\nrm"]
    replace_text(tmp_path / "page.html", "\ud800")
    assert (tmp_path / "page.html").read_text() == r"\ud800"


def test_a_metric_s_name_is_no_formula(tmp_path: Path) -> None:
    names = ["=cmd()", "+1", "-1", "@SUM(A1)", "a\nb", "loss"]
    with open(tmp_path / "log.csv", "w", newline="") as file:
        csv.writer(file).writerow(map(heading, names))
    (row,) = csv.reader((tmp_path / "log.csv").open(newline=""))
    assert row == ["'=cmd()", "'+1", "'-1", "'@SUM(A1)", r"a\nb", "loss"]


def test_an_error_s_record_is_bounded(tmp_path: Path) -> None:
    error: BaseException = RuntimeError("x" * 10**7)
    try:
        raise error
    except RuntimeError:
        plan: Any = SimpleNamespace()
        kept = rank_error(error, plan, 0)
    assert len(str(kept.message)) < LONGEST_MESSAGE + 100 and len(kept.traceback) <= LONGEST_MESSAGE
    with pytest.raises(TrainingFailed), recorded(tmp_path, ("samestep", "run")):
        raise TrainingFailed(TEXT + "x" * 10**7)
    reason = read(CommandRecord, tmp_path / COMMAND).reason
    assert reason and len(str(reason)) < LONGEST_MESSAGE + 100 and "\x1b" not in str(reason)


@pytest.mark.parametrize(
    ("words", "cwd", "given"),
    [
        (("samestep", "run", "my job.py", "--set", "name=$(touch canary)"), "/tmp/a b", True),
        (("samestep", "run", "Zürich.py"), "/tmp", True),
        (("rm", "-rf", "/"), "/tmp", False),
        (("samestep; rm", "run"), "/tmp", False),
        (("samestep", "monitor", "--", "rm", "-rf", "/"), "/tmp", False),
        (("samestep", "run", "a\nrm -rf ~"), "/tmp", False),
        (("samestep", "run", "a"), "/tmp\nrm -rf ~", False),
        (("samestep", "run", "\u202eyp.a"), "/tmp", False),
        ((), "/tmp", False),
    ],
)
def test_the_line_to_paste_is_samestep_s_and_one_line(
    words: tuple[str, ...], cwd: str, given: bool, tmp_path: Path
) -> None:
    (tmp_path / "study.json").write_text("{}")
    write(tmp_path / COMMAND, CommandRecord(words, cwd, 1.0, "failed", as_said("why")))
    (run,) = runs(tmp_path)
    assert run.line == (f"cd {shlex.quote(cwd)} && {shlex.join(words)}" if given else "")


LOCALE = {"PYTHONIOENCODING": "ascii", "PATH": "/usr/bin", "COLUMNS": "80"}


def test_a_terminal_of_another_encoding_shows_escapes(tmp_path: Path) -> None:
    folder = tmp_path / "Zürich"
    folder.mkdir()
    (folder / "study.json").write_text("{}")
    write(folder / COMMAND, CommandRecord(("samestep", "run", "ü.py"), "/", 1.0, "failed", as_said("why")))
    command = [sys.executable, "-m", "samestep", "runs", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, env=LOCALE)
    assert done.returncode == 0 and rb"Z\xfcrich" in done.stdout and b"Traceback" not in done.stderr
    listed = subprocess.run([*command, "--json"], capture_output=True, env=LOCALE)
    assert json.loads(listed.stdout)["runs"][0]["folder"] == str(folder)
