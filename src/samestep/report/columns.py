"""The columns of measured figures, in the terminal's table and in the page's: a new one is a row of MEASURED."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from samestep.records.results import EngineResult
from samestep.report import numbers

Cell = Callable[[EngineResult], str]


@dataclass(frozen=True)
class Column:
    """A column of a table.

    heading, cell: the terminal's heading, and the text of a row's cell; no heading: the column is on the page alone.
    leave_out: the order in which columns are left out of a narrow terminal, the highest first; 0: never.
    page_heading, page_cell: on the page; no heading: the column is in the terminal alone; no cell: the terminal's.
    detail: what the page shows in small print below the figure.
    """

    heading: str
    cell: Cell
    leave_out: int = 0
    page_heading: str = ""
    page_cell: Cell | None = None
    detail: Cell = lambda row: ""

    def on_page(self, row: EngineResult) -> str:
        """Returns the text of a row's cell on the page."""
        return (self.page_cell or self.cell)(row)


MEASURED = (
    Column(
        "samples/s",
        lambda row: numbers.median(row.samples_per_second, numbers.amount),
        2,
        "samples/s",
        detail=lambda row: numbers.interval_and_n(row.samples_per_second, numbers.amount),
    ),
    Column("±", lambda row: numbers.spread(row.samples_per_second), 4),
    Column(
        "× one",
        lambda row: numbers.median(row.ratio, numbers.factor),
        1,
        "× one\nprocess",
        detail=lambda row: numbers.interval(row.ratio, numbers.factor),
    ),
    Column("", lambda row: numbers.median(row.efficiency, numbers.percent), page_heading="scaling\nefficiency"),
    Column(
        "ms/step",
        lambda row: numbers.amount(row.step_ms.step if row.step_ms else None),
        5,
        "wait / step,\nms",
        lambda row: numbers.wait_and_step(row.step_ms),
    ),
    Column("MiB", lambda row: numbers.amount(row.peak_memory_mib), 7, "peak MiB\nper rank"),
    Column("start s", lambda row: numbers.amount(row.startup_s), 8, "start-up,\ns"),
)
IN_TERMINAL = tuple(column for column in MEASURED if column.heading)
ON_PAGE = tuple(column for column in MEASURED if column.page_heading)
