"""The terminal on which commands print, and its table of the engines: one line an engine.

Texts from elsewhere are shown on it, and do not act on it. Where it is too narrow, whole columns are left out.
Intervals, bounds and notes are in the HTML report. A figure is never cropped: only names and verdicts wrap.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderResult
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from samestep.errors import LONGEST_MESSAGE, printable
from samestep.message import message
from samestep.records.results import CompareResults, EngineResult
from samestep.report import columns, numbers
from samestep.report.columns import Column
from samestep.report.cost_table import HEADINGS, cost_rows
from samestep.report.language import text as text_of
from samestep.report.verdicts import comparable_rows, label, ranks_of, short_verdict, title


def cell(text: str, style: str | Style = "") -> Text:
    """Returns a cell of a table: one line, in which rich's markup is text."""
    return Text(printable(text), style=style)


class Terminal(Console):
    """A rich console that prints control characters as escapes; colours and its own movements of the cursor stay."""

    def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yields what rich makes of a renderable. All that is printed, of tables too, comes through here."""
        for segment in super().render(renderable, options):
            text, style, control = segment
            if control is None and not text.isprintable():
                text = printable(text, LONGEST_MESSAGE, lines=True)
            # A link of a style is written into the terminal as it came.
            safe = style.update_link(None) if style is not None and style.link else style
            yield Segment(text, safe, control)

    def show_line(self, text: str, style: str | Style = "") -> None:
        """Prints one line, which the terminal may wrap; rich's markup in it, as [bold], is text."""
        self.print(cell(text, style), soft_wrap=True)


def terminal(width: int) -> Terminal:
    """Returns a console on stdout; of this width where that is no terminal (a file, a log)."""
    console = Terminal()
    return console if console.is_terminal or "COLUMNS" in os.environ else Terminal(width=width)


STYLES = {
    "same": "green",
    "approximate": "yellow",
    "differs": "bold red",
    "failed": "bold red",
    "refused": "yellow",
    "unavailable": "dim",
}
MOST = 100  # characters in a line, however wide the terminal is

ENGINE = Column("engine", title)
ENGINE_AND_LAUNCHER = Column("engine", label)  # where an engine has several rows
LAUNCHER = Column("launcher", lambda row: row.launcher, 6)
VERDICT = Column("verdict", short_verdict)
RANKS = Column("ranks", ranks_of, 4)
DIFFERENCE = Column("max diff.", lambda row: numbers.difference(row.max_difference), 3)


def table_of_costs(results: CompareResults) -> Table | None:
    """Returns the table of what a step costs each rank; None where nobody has looked."""
    rows = cost_rows(results)
    if not rows:
        return None
    title_of_table = text_of(message("heading_costs_of_a_step"))
    shape: dict[str, Any] = {"box": box.SIMPLE_HEAD, "show_edge": False, "pad_edge": False, "padding": (0, 1, 0, 0)}
    table = Table(title=title_of_table, title_justify="left", title_style="", **shape)
    table.add_column(text_of(message("heading_engine")).lower(), overflow="fold")
    for heading in HEADINGS:
        table.add_column(text_of(heading), justify="right")
    for row in rows:
        table.add_row(cell(row.engine), *map(cell, row.cells))
    return table


class TerminalTable:
    """A table that fits the console that it is printed on."""

    def __init__(self, results: CompareResults) -> None:
        self.rows = [row for row in results.engines if row.verdict != "unavailable"]
        self.compared = comparable_rows(results)
        several = len({title(row) for row in self.rows}) < len(self.rows)
        names = [ENGINE_AND_LAUNCHER] if several else [ENGINE, LAUNCHER]
        ranks = [RANKS] if any(row.second for row in self.rows) else []
        self.columns = [*names, VERDICT, *ranks, DIFFERENCE, *(columns.IN_TERMINAL if results.measured else ())]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, MOST)
        gap = 2 if width >= MOST else 1
        columns_shown = self._columns_that_fit(width, gap)
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, gap - 1, 0, 0))
        for column, column_width in zip(columns_shown, self._widths(columns_shown, width, gap)):
            justify: JustifyMethod = "right" if column is DIFFERENCE or column in columns.IN_TERMINAL else "left"
            table.add_column(column.heading, justify=justify, width=column_width)
        for row in self.rows:
            table.add_row(*(self._cell(column, row) for column in columns_shown))
        yield from console.render(table, options.update(width=width))

    def _columns_that_fit(self, width: int, gap: int) -> list[Column]:
        """Returns the columns without those that a terminal of `width` characters has no room for."""
        columns_shown = list(self.columns)
        while sum(self._width(column) + gap for column in columns_shown) - gap > width:
            next_out = max(columns_shown, key=lambda column: column.leave_out)
            if next_out.leave_out == 0:
                break
            columns_shown.remove(next_out)
        return columns_shown

    def _width(self, column: Column) -> int:
        return max(map(cell_len, [column.heading, *map(column.cell, self.rows)]))

    def _widths(self, columns_shown: Sequence[Column], width: int, gap: int) -> list[int]:
        """Each column's width. Where not even the names fit, they wrap."""
        widths = [self._width(column) for column in columns_shown]
        excess = sum(widths) + gap * (len(columns_shown) - 1) - width
        if excess > 0:
            widest = max(range(len(columns_shown)), key=lambda i: widths[i])
            widths[widest] = max(1, widths[widest] - excess)
        return widths

    def _cell(self, column: Column, row: EngineResult) -> Text:
        """Text, not str: rich would read '[…]' in a name as its markup."""
        if column is VERDICT:
            return cell(column.cell(row), STYLES[row.verdict])
        if column in columns.IN_TERMINAL and row not in self.compared:
            return Text(numbers.MISSING, style="dim")
        return cell(column.cell(row), "dim" if column in (LAUNCHER, RANKS, DIFFERENCE) else "")
