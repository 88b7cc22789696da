"""Prints a doctor's report: a table of what is not well, and the lines that fix it."""

from __future__ import annotations

from collections import Counter

from rich.table import Table

from samestep.records.doctor import Judged, Report
from samestep.report.console import Terminal, cell
from samestep.world.checks import Status

COLOURS = {"FAIL": "red", "WARN": "yellow", "UNKNOWN": "dim", "OK": "green"}
ORDER: tuple[Status, ...] = ("FAIL", "WARN", "UNKNOWN", "OK")


def show_report(report: Report, *, all_: bool = False) -> None:
    """Prints the table. all_: also what is well."""
    console = Terminal(soft_wrap=False)
    shown = [each for each in report.findings if all_ or each.status != "OK"]
    several = len(report.machines) > 1
    if shown:
        console.print(_table(shown, several))
    fixes = [each for each in shown if each.fix]
    if fixes:
        console.print("\nto fix:", style="bold")
        for each in {each.fix: each for each in reversed(fixes)}.values():
            where = f" on {each.machine}" if several and each.machine else ""
            console.show_line(f"  # {each.check}{where}", "dim")
            console.show_line(f"  {each.fix}")
    console.show_line("")
    console.show_line(summary(report), "bold")


def _table(findings: list[Judged], several: bool) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("", "check", *(["machine"] if several else []), "what"):
        table.add_column(column, overflow="fold")
    for each in sorted(findings, key=lambda each: ORDER.index(each.status)):
        cells = [cell(each.status, style=COLOURS[each.status]), cell(each.check)]
        table.add_row(*cells, *([cell(each.machine)] if several else []), cell(each.why))
    return table


def summary(report: Report) -> str:
    """Returns '21 OK, 1 WARN on 2 machines in 9.1 s'."""
    counts = Counter(each.status for each in report.findings)
    counted = ", ".join(f"{counts[status]} {status}" for status in reversed(ORDER) if counts[status])
    machines = len(report.machines)
    where = f" on {machines} machines" if machines > 1 else ""
    return f"{counted}{where} in {report.seconds:.1f} s"
