"""The terminal's table at 100, 80 and 40 characters: one line an engine, no figure cropped, nothing wider."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from itertools import pairwise

import pytest
from example_results import unmeasured, with_row, with_speed
from rich.console import Console

from samestep import report
from samestep.message import as_said, message
from samestep.records.results import CompareResults
from samestep.report import columns

TENSORS = (message("tensors_ill_conditioned", sgd=["0.weight"], user=["0.weight", "1.bias"]),)
WIDTHS = pytest.mark.parametrize("width", [100, 80, 40])
FIGURE = re.compile(r"–|0|[\d,]+(\.\d+)?(e-\d\d)?( %)?")


def printed(results: CompareResults, width: int) -> list[str]:
    """The table's lines."""
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(report.table(results))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


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
            assert line.startswith(row.engine) and report.verdict_text(row).partition(":")[0] in line


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


def test_what_is_wrong_is_below_the_table(results: CompareResults) -> None:
    text = "\n".join(report.footer(results))
    assert "lightning (torchrun): differs at step 3: loss of rank 1: expected 2.302585092994046, found" in text
    assert "the usual cause: the update of step 2 is wrong" in text
    assert "horovod (horovodrun): failed: rank 1 was killed (signal 9) in step 12." in text
    assert "deepspeed (torchrun): refused: step 23: rank 1 gets 1 row" in text
    assert "One step sees 2 ranks x 32 = 64 samples; 1 thread a rank." in text
    assert "5 launches of 60 steps" in text
    assert "Notes on fsdp: in the report." in text and "clipping never acted" not in text


def test_a_proof_speaks_of_no_speed(proof: CompareResults) -> None:
    text = "\n".join([*printed(proof, 100), *report.footer(proof)])
    assert "samples/s" not in text and "launches" not in text and "2.2e-16" in text


def test_tensors_that_cannot_be_compared_are_one_line(results: CompareResults) -> None:
    results = replace(with_row(results, 3, notes=TENSORS), tensors=18)
    (line,) = [line for line in report.footer(results) if "tensors" in line]
    assert line == "fsdp (torchrun): 2 of 18 tensors not compared at the end, where rounding alone is visible."
    page = report.html(results)
    assert (
        "<details><summary>2 of 18 tensors not compared at the end, where rounding alone is visible</summary>" in page
    )
    assert page.count("<small>0.weight</small>") == 2 and page.count("<small>1.bias</small>") == 1


def test_engines_that_are_not_here_share_a_line(results: CompareResults) -> None:
    results = with_row(
        results, 7, verdict="unavailable", reason=as_said("lightning is not installed"), install="pip install x"
    )
    results = with_row(
        results, 6, verdict="unavailable", reason=as_said("lightning is not installed"), install="pip install x"
    )
    assert (
        report.footer(results)[-1]
        == "Not available here: horovod, deepspeed (pip install x); dataparallel (no-op on CPU)."
    )
    assert "to install: <code>pip install x</code>" in report.html(results)
