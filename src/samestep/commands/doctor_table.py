"""Prints a doctor's report: a table of what is not well, and the lines that fix it."""

from __future__ import annotations

from collections import Counter

from rich.console import Console
from rich.table import Table
from rich.text import Text

from samestep.records.doctor import Judged, Report
from samestep.world.checks import Status

COLOURS = {"FAIL": "red", "WARN": "yellow", "UNKNOWN": "dim", "OK": "green"}
ORDER: tuple[Status, ...] = ("FAIL", "WARN", "UNKNOWN", "OK")


def show_report(report: Report, *, all_: bool = False) -> None:
    """Prints the table. all_: also what is well."""
    console = Console(soft_wrap=False)
    shown = [each for each in report.findings if all_ or each.status != "OK"]
    several = len(report.machines) > 1
    if shown:
        console.print(_table(shown, several))
    fixes = [each for each in shown if each.fix]
    if fixes:
        console.print("\nto fix:", style="bold")
        for each in {each.fix: each for each in reversed(fixes)}.values():
            where = f" on {each.machine}" if several and each.machine else ""
            console.print(Text(f"  # {each.check}{where}", style="dim"), soft_wrap=True)
            console.print(Text(f"  {each.fix}"), soft_wrap=True)
    console.print(Text(f"\n{summary(report)}", style="bold"), soft_wrap=True)


def _table(findings: list[Judged], several: bool) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("", "check", *(["machine"] if several else []), "what"):
        table.add_column(column)
    for each in sorted(findings, key=lambda each: ORDER.index(each.status)):
        cells = [Text(each.status, style=COLOURS[each.status]), Text(each.check)]
        table.add_row(*cells, *([Text(each.machine)] if several else []), Text(each.why))
    return table


def summary(report: Report) -> str:
    """Returns '21 OK, 1 WARN on 2 machines in 9.1 s'."""
    counts = Counter(each.status for each in report.findings)
    counted = ", ".join(f"{counts[status]} {status}" for status in reversed(ORDER) if counts[status])
    machines = len(report.machines)
    where = f" on {machines} machines" if machines > 1 else ""
    return f"{counted}{where} in {report.seconds:.1f} s"
