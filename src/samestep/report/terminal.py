"""The terminal's table. A cell holds its median above its interval, so that all columns fit in 80 characters."""

from __future__ import annotations

from textwrap import shorten

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from samestep.records.results import EngineResult, StudyResults
from samestep.report import numbers
from samestep.report.sentences import comparable_rows, speed, title, verdict_text

STYLES = {
    "same": "green",
    "approximate": "yellow",
    "differs": "bold red",
    "failed": "bold red",
    "refused": "yellow",
    "unavailable": "dim",
}
HEADINGS = ["samples/s", "× one\nprocess", "effi-\nciency", "step\nwait\nms", "peak MiB\nstart, s"]


class _FittedTable(Table):
    """A table that has no space between its columns on a terminal of fewer than 100 characters."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        self.padding = (0, 1) if options.max_width >= 100 else (0, 0)
        yield from super().__rich_console__(console, options)


def terminal_table(results: StudyResults) -> Table:
    """One row for each engine and launcher. A proof alone has no columns of measurement.

    Only the verdict wraps, between words.
    """
    with_speed = results.measured
    table = _FittedTable(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True, leading=int(with_speed)
    )
    table.add_column("engine\nlauncher" if with_speed else "engine", no_wrap=True)
    if not with_speed:
        table.add_column("launcher", no_wrap=True)
    table.add_column("verdict", min_width=len("unavailable"))
    table.add_column(f"max diff.\n{results.proof.dtype}", justify="right")
    for heading in HEADINGS if with_speed else ["bound"]:
        table.add_column(heading, justify="right", no_wrap=True)
    compared = comparable_rows(results)
    for row in results.engines:
        first = [_stacked(title(row), row.launcher)] if with_speed else [Text(title(row)), Text(row.launcher)]
        proof = [_verdict(row), Text(numbers.difference(row.max_difference))]
        rest = [Text(numbers.difference(row.bound), style="dim")]
        if with_speed:
            rest = _measurement(row) if row in compared else [Text(numbers.MISSING)] * len(HEADINGS)
        table.add_row(*first, *proof, *rest)
    return table


def _measurement(row: EngineResult) -> list[Text]:
    """The cells under HEADINGS."""
    samples, ratio, step = speed(row), row.ratio, row.step_ms
    return [
        _stacked(f"{numbers.amount(samples.median)} n={samples.n}", numbers.interval(samples, numbers.amount)),
        _stacked(numbers.median(ratio, numbers.factor), numbers.interval(ratio, numbers.factor)),
        Text(numbers.median(row.efficiency, numbers.percent)),
        _stacked(numbers.amount(step.step if step else None), numbers.amount(step.wait if step else None)),
        _stacked(numbers.amount(row.peak_memory_mib), numbers.amount(row.startup_s)),
    ]


def _verdict(row: EngineResult) -> Text:
    """The verdict, with the start of its reason (the notes have all of it).

    Text, not str: rich would read '[…]' in a reason as its markup.
    """
    verdict = Text(verdict_text(row), style=STYLES[row.verdict])
    if row.reason:
        verdict.append(f": {shorten(row.reason, 80, placeholder=' …')}", style="not bold")
    return verdict


def _stacked(first: str, second: str) -> Text:
    return Text(first).append(f"\n{second}", style="dim") if second else Text(first)
