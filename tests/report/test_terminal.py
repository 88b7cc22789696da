"""The terminal's table: readable at 120 characters, complete at 80, and without the speed of what was not proven."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from example_results import with_row, with_speed
from rich.console import Console

from samestep import report
from samestep.records.results import StudyResults


def printed(results: StudyResults, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(report.table(results))
    return str(console.file.getvalue()).splitlines()  # type: ignore[attr-defined]


def verdicts(lines: list[str]) -> list[str]:
    """The verdict column, a row's wrapped lines joined: it ends where the numbers' first heading begins."""
    heading = next(line for line in lines if "verdict" in line)
    start = heading.index("verdict")
    end = next(line for line in lines if "max diff." in line).index("max diff.")
    body = lines[next(i for i, line in enumerate(lines) if line.startswith("──")) + 1 :]
    rows: list[str] = []
    for line in body:
        if not line.strip():
            continue
        if rows and line[:start].strip().split("  ")[0] not in ENGINES:
            rows[-1] = f"{rows[-1]} {line[start:end].strip()}".strip()
        else:
            rows.append(line[start:end].strip())
    return rows


ENGINES = ("single", "ddp", "fsdp", "amp", "lightning", "horovod", "deepspeed", "dataparallel")


@pytest.mark.parametrize("width", [80, 100, 120, 160])
def test_every_verdict_is_whole_at_any_width(results: StudyResults, width: int) -> None:
    lines = printed(results, width)
    assert max(map(len, lines)) <= width
    shown = verdicts(lines)
    assert len(shown) == len(results.engines) == 9
    for text, row in zip(shown, results.engines):
        assert text.startswith(report.verdict_text(row))


@pytest.mark.parametrize("width", [80, 120])
def test_no_number_is_cut(results: StudyResults, width: int) -> None:
    text = "\n".join(printed(results, width))
    for number in ("5,203 n=5", "5,047–5,307", "1.51–1.59", "78 %", "12.3", "0.12", "398", "4.62", "2.2e-16"):
        assert number in text


def test_an_engine_that_differs_shows_no_speed(results: StudyResults) -> None:
    text = "\n".join(printed(results, 120))
    assert "7,111" not in text
    same = replace(results, engines=[replace(row, verdict="same") for row in results.engines])
    assert "7,111" in "\n".join(printed(same, 120))


def test_a_reason_is_text_and_not_markup(results: StudyResults) -> None:
    results = with_row(results, -1, reason="[bold]list[/bold] [0]")
    assert "[bold]list[/bold] [0]" in "\n".join(printed(results, 160))


def test_a_long_reason_is_cut_in_the_table_and_whole_in_the_notes(results: StudyResults) -> None:
    results = with_row(results, -1, reason="word " * 60 + "end")
    assert len(printed(results, 80)) < 60
    assert any("word end" in note for note in report.notes(results))


def test_a_proof_alone_has_no_columns_of_speed(proof: StudyResults) -> None:
    lines = printed(proof, 80)
    text = "\n".join(lines)
    assert max(map(len, lines)) <= 80
    assert "samples/s" not in text and "start" not in text
    assert "1.2e-15" in text and "torchrun" in text
    assert "differs at step 3: loss of rank" in text


def test_single_values_may_be_missing(results: StudyResults) -> None:
    missing = dict.fromkeys(("ratio", "efficiency", "step_ms", "peak_memory_mib", "startup_s"))
    results = with_speed(with_row(results, 1, **missing), 1, n=1, low=5203.0, high=5203.0)
    lines = printed(results, 120)
    first = next(line for line in lines if line.startswith("ddp"))
    assert "5,203 n=1" in first and first.count("–") == 4
    assert "5,047" not in "\n".join(lines) and "5,203–" not in "\n".join(lines)  # one launch has no interval
