"""The terminal's table at 100, 80 and 40 characters: one line an engine, no figure cropped, nothing wider."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import golden_file
import pytest
from example_results import unmeasured, with_row, with_speed
from rich.console import Console

from said import says
from samestep import report
from samestep.message import as_said, message
from samestep.records.results import CompareResults
from samestep.report import columns, verdicts
from samestep.report.language import LANGUAGES, VARIABLE, Language

TENSORS = (message("tensors_ill_conditioned", sgd=["0.weight"], user=["0.weight", "1.bias"]),)
WIDTHS = pytest.mark.parametrize("width", [100, 80, 40])
FIGURE = re.compile(r"–|0|[\d,]+(\.\d+)?(e-\d\d)?( %)?")


def printed(results: CompareResults, width: int) -> list[str]:
    """The table's lines."""
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(report.table(results))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def with_tensors(results: CompareResults) -> CompareResults:
    """The results where two of 18 tensors could not be compared."""
    return replace(with_row(results, 3, notes=TENSORS), tensors=18)


def without_engines(results: CompareResults) -> CompareResults:
    """The results where two more engines are not installed."""
    absent: dict[str, Any] = {"verdict": "unavailable", "reason": as_said("no package"), "install": "pip install x"}
    return with_row(with_row(results, 7, **absent), 6, **absent)


def one_launcher(results: CompareResults) -> CompareResults:
    """The results without the row of ddp under its second launcher."""
    return replace(results, engines=[row for row in results.engines if row.launcher != "spawn"])


@WIDTHS
def test_each_engine_that_ran_has_one_line(results: CompareResults, proof: CompareResults, width: int) -> None:
    for shown in (results, proof, one_launcher(results), one_launcher(proof)):
        lines = printed(shown, width)
        assert max(map(len, lines)) <= width
        ran = [row for row in shown.engines if row.verdict != "unavailable"]
        assert len(lines) == 2 + len(ran)
        for line, row in zip(lines[2:], ran):
            assert line.startswith(row.engine) and verdicts.short_verdict(row) in line


@WIDTHS
def test_every_figure_is_whole(results: CompareResults, width: int) -> None:
    """What is in a line after the verdict is what numbers.py writes, all of it, or the column is not there."""
    results = with_row(one_launcher(results), 2, max_difference=8.3e-16)
    heading, _, *lines = printed(results, width)
    for line, row in zip(lines, results.engines):
        figures = line.partition(report.verdict_text(row).partition(":")[0])[2].strip()
        assert all(FIGURE.fullmatch(figure) for figure in re.split(r"(?<!\d) +|(?<=\d) +(?!%)", figures) if figure)
    assert ("8.3e-16" in lines[2]) == ("max diff." in heading) == (width >= 80)
    assert ("5,203" in lines[1]) == ("samples/s" in heading) == (width >= 80)
    assert "1.56" in lines[1] and "× one" in heading


def test_columns_are_left_out_in_their_order(results: CompareResults) -> None:
    def headings(width: int) -> list[str]:
        first = printed(one_launcher(results), width)[0]
        return first.replace("max diff", "max_diff").replace("× one", "×").split()

    measured = " ".join(column.heading for column in columns.IN_TERMINAL).replace("× one", "×")
    every = ["engine", "launcher", "verdict", "max_diff.", *measured.split()]
    assert headings(100) == every
    lost = {tuple(name for name in every if name not in headings(width)): width for width in range(100, 39, -1)}
    order = list(lost)
    assert all(set(fewer) < set(more) for fewer, more in pairwise(order))
    assert order[-1] == tuple(name for name in every if name not in ("engine", "verdict", "×"))


def test_an_engine_with_two_launchers_is_named_with_them(results: CompareResults) -> None:
    for width in (100, 40):
        assert any(line.startswith("ddp (spawn)") for line in printed(results, width))


def test_a_wide_terminal_gets_no_wider_table(results: CompareResults) -> None:
    assert printed(results, 200) == printed(results, 100)


@WIDTHS
def test_long_settings_wrap(results: CompareResults, width: int) -> None:
    results = with_row(one_launcher(results), 2, settings={"a_setting": "of_many_letters", "another_one": "too"})
    text = "\n".join(printed(results, width))
    assert max(map(len, text.splitlines())) <= width
    for part in ("fsdp", "a_setting=", "another_one=too", "same step"):
        assert part in text.replace("\n", "") or part in text


def test_an_engine_that_differs_shows_no_speed(results: CompareResults) -> None:
    assert "7,111" not in "\n".join(printed(results, 100))
    same = replace(results, engines=[replace(row, verdict="same") for row in results.engines])
    assert "7,111" in "\n".join(printed(same, 100))


def test_a_name_is_text_and_not_markup(results: CompareResults) -> None:
    results = with_row(results, 3, settings={"[bold]list[/bold]": "[0]"})
    assert "[bold]list[/bold]=[0]" in "".join(printed(results, 100))


def test_single_values_may_be_missing(results: CompareResults) -> None:
    results = with_speed(with_row(results, 1, **unmeasured()), 1, n=1, low=5203.0, high=5203.0)
    first = next(line for line in printed(results, 100) if line.startswith("ddp"))
    assert "5,203" in first and first.count("–") == 5  # one launch has no spread


@pytest.mark.parametrize("into", LANGUAGES)
def test_the_golden_file_holds_what_is_printed(
    results: CompareResults, proof: CompareResults, into: Language, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table, and below it what is wrong, what could not be compared, and what is not here, in few lines."""
    monkeypatch.setenv(VARIABLE, into)
    text = {}
    for name, shown in (
        ("a comparison", results),
        ("a proof", proof),
        ("tensors that cannot be compared", with_tensors(results)),
        ("engines that are not here", without_engines(results)),
    ):
        text |= {f"the table of {name}": printed(shown, 100), f"below {name}": report.footer(shown)}
    golden_file.agrees(f"terminal.{into}", golden_file.parts(text))


def test_a_proof_speaks_of_no_speed(proof: CompareResults) -> None:
    text = "\n".join([*printed(proof, 100), *report.footer(proof)])
    assert "samples/s" not in text and "launches" not in text and "2.2e-16" in text


def test_tensors_that_cannot_be_compared_are_folded_on_the_page(results: CompareResults) -> None:
    results = with_tensors(results)
    page = report.html(results)
    said = verdicts.ill_conditioned(results.engines[3], results)
    says(said, "tensors_not_compared", count=2, tensors=18)
    assert f"<details><summary>{said}</summary>" in page
    assert page.count("<small>0.weight</small>") == 2 and page.count("<small>1.bias</small>") == 1


def test_the_page_says_what_installs_an_engine(results: CompareResults) -> None:
    assert "<code>pip install x</code>" in report.html(without_engines(results))
