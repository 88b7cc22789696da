"""The terminal's table: one line an engine. Where the terminal is too narrow, whole columns are left out.

Intervals, bounds and notes are in the HTML report. A figure is never cropped: only names and verdicts wrap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderResult
from rich.table import Table
from rich.text import Text

from samestep.records.results import EngineResult, StudyResults
from samestep.report import numbers
from samestep.report.sentences import comparable_rows, label, short_verdict, title

STYLES = {
    "same": "green",
    "approximate": "yellow",
    "differs": "bold red",
    "failed": "bold red",
    "refused": "yellow",
    "unavailable": "dim",
}
MOST = 100  # characters in a line, however wide the terminal is


@dataclass(frozen=True)
class Column:
    """A column: its heading, and the text of a row's cell. gone: the order in which columns are left out, the highest
    first; 0: never."""

    heading: str
    cell: Callable[[EngineResult], str]
    gone: int

    def width(self, rows: Sequence[EngineResult]) -> int:
        return max(map(cell_len, [self.heading, *map(self.cell, rows)]))


ENGINE = Column("engine", title, 0)
ENGINE_AND_LAUNCHER = Column("engine", label, 0)  # where an engine has several rows
LAUNCHER = Column("launcher", lambda row: row.launcher, 6)
VERDICT = Column("verdict", short_verdict, 0)
DIFFERENCE = Column("max diff.", lambda row: numbers.difference(row.max_difference), 3)
SPEED = (
    Column("samples/s", lambda row: numbers.median(row.samples_per_second, numbers.amount), 2),
    Column("±", lambda row: numbers.spread(row.samples_per_second), 4),
    Column("× one", lambda row: numbers.median(row.ratio, numbers.factor), 1),
    Column("ms/step", lambda row: numbers.amount(row.step_ms.step if row.step_ms else None), 5),
    Column("MiB", lambda row: numbers.amount(row.peak_memory_mib), 7),
    Column("start s", lambda row: numbers.amount(row.startup_s), 8),
)


class TerminalTable:
    """A table that fits the console that it is printed on."""

    def __init__(self, results: StudyResults) -> None:
        self.rows = [row for row in results.engines if row.verdict != "unavailable"]
        self.compared = comparable_rows(results)
        several = len({title(row) for row in self.rows}) < len(self.rows)
        names = [ENGINE_AND_LAUNCHER] if several else [ENGINE, LAUNCHER]
        self.columns = [*names, VERDICT, DIFFERENCE, *(SPEED if results.measured else ())]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, MOST)
        gap = 2 if width >= MOST else 1
        shown = self._fitting(width, gap)
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, gap - 1, 0, 0))
        for column, column_width in zip(shown, self._widths(shown, width, gap)):
            justify: JustifyMethod = "right" if column is DIFFERENCE or column in SPEED else "left"
            table.add_column(column.heading, justify=justify, width=column_width)
        for row in self.rows:
            table.add_row(*(self._cell(column, row) for column in shown))
        yield from console.render(table, options.update(width=width))

    def _fitting(self, width: int, gap: int) -> list[Column]:
        """The columns that fit side by side: without the one to leave out first, and so on, until they do."""
        shown = list(self.columns)
        while sum(column.width(self.rows) + gap for column in shown) - gap > width:
            last = max(shown, key=lambda column: column.gone)
            if last.gone == 0:
                break
            shown.remove(last)
        return shown

    def _widths(self, shown: Sequence[Column], width: int, gap: int) -> list[int]:
        """Each column's width. Where not even the names fit, they wrap."""
        widths = [column.width(self.rows) for column in shown]
        excess = sum(widths) + gap * (len(shown) - 1) - width
        if excess > 0:
            widest = max(range(len(shown)), key=lambda i: widths[i])
            widths[widest] = max(1, widths[widest] - excess)
        return widths

    def _cell(self, column: Column, row: EngineResult) -> Text:
        """Text, not str: rich would read '[…]' in a name as its markup."""
        if column is VERDICT:
            return Text(column.cell(row), style=STYLES[row.verdict])
        if column in SPEED and row not in self.compared:
            return Text(numbers.MISSING, style="dim")
        return Text(column.cell(row), style="dim" if column in (LAUNCHER, DIFFERENCE) else "")
