"""report: the `results` of verify or compare (plain JSON) as text. Pure functions; nothing here imports torch.

Drawing is imported when asked for, because `samestep --help` and `--json` need none of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from samestep.report.sentences import notes, verdict_text

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["html", "notes", "table", "verdict_text"]


def table(results: dict[str, Any]) -> Table:
    """The engines as a terminal table."""
    from samestep.report.terminal import terminal_table

    return terminal_table(results)


def html(results: dict[str, Any]) -> str:
    """The whole report as one HTML page that needs no other file and no network."""
    from samestep.report.page import page

    return page(results)
