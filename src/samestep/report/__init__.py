"""Shows the results of verify or compare: a terminal table, notes, and an HTML page. Nothing here imports torch.

rich, jinja2 and matplotlib are imported when they are needed: `samestep --help` and `--json` need none of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from samestep.report.verdicts import footer, notes, trials, verdict_text

if TYPE_CHECKING:
    from rich.table import Table

    from samestep.records.results import CompareResults
    from samestep.report.terminal import TerminalTable

__all__ = ["costs", "footer", "html", "notes", "table", "trials", "verdict_text"]


def table(results: CompareResults) -> TerminalTable:
    """The engines as a table to print on a rich console, as wide as that is."""
    from samestep.report.terminal import TerminalTable

    return TerminalTable(results)


def costs(results: CompareResults) -> Table | None:
    """What a step costs each rank, as a table to print on a rich console; None where nobody has looked."""
    from samestep.report.terminal import table_of_costs

    return table_of_costs(results)


def html(results: CompareResults) -> str:
    """The whole report as one HTML page that needs no other file and no network."""
    from samestep.report.page import page

    return page(results)
