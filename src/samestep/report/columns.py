"""The columns of measured figures, in the terminal's table and in the page's: a new one is a row of MEASURED."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from samestep.message import Message, message
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
    page_heading: Message | None = None
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
        message("heading_samples_per_second"),
        detail=lambda row: numbers.interval_and_n(row.samples_per_second, numbers.amount),
    ),
    Column("±", lambda row: numbers.spread(row.samples_per_second), 4),
    Column(
        "× one",
        lambda row: numbers.median(row.ratio, numbers.factor),
        1,
        message("heading_ratio_to_one_process"),
        detail=lambda row: numbers.interval(row.ratio, numbers.factor),
    ),
    Column(
        "",
        lambda row: numbers.median(row.efficiency, numbers.percent),
        page_heading=message("heading_scaling_efficiency"),
    ),
    Column(
        "ms/step",
        lambda row: numbers.amount(row.step_ms.step if row.step_ms else None),
        5,
        message("heading_wait_and_step"),
        lambda row: numbers.wait_and_step(row.step_ms),
    ),
    Column("MiB", lambda row: numbers.amount(row.peak_memory_mib), 7, message("heading_peak_memory")),
    Column("start s", lambda row: numbers.amount(row.startup_s), 8, message("heading_startup")),
)
IN_TERMINAL = tuple(column for column in MEASURED if column.heading)
ON_PAGE = tuple(column for column in MEASURED if column.page_heading)
