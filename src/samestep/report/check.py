"""Prints the results of `samestep check`: a line a question, and the first divergence with its cause."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from samestep.records.results import Divergence
from samestep.records.script import CheckResults, DiffResults, Finding
from samestep.report.console import cell, terminal
from samestep.report.sentences import sentence, value, where

STYLES = {"right": "green", "differs": "bold red", "unknown": "yellow", "warning": "bold yellow"}


def show_check(results: CheckResults) -> None:
    """Prints the answers and the verdict on stdout."""
    _show(results.findings, lines(results))


def show_diff(results: DiffResults) -> None:
    """Prints what is the same in two records, and where they part."""
    texts = [f"note: {note}" for note in results.notes]
    first = results.first_divergence
    if first:
        texts += _divergence(f"{results.second} against {results.first}", first)
    elif results.answer == "right":
        after = f" after step {results.resumed_at - 1}" if results.resumed_at else ""
        texts.append(f"{results.second} took the {results.steps} steps of {results.first}{after}")
    else:
        texts.append("unknown: what the answer needs could not be compared")
    _show(results.findings, ["", *(sentence(text) for text in texts)])


def _show(findings: Sequence[Finding], texts: Sequence[str]) -> None:
    console = terminal(100)
    table = Table(box=None, pad_edge=False, show_header=False)
    for _ in ("question", "answer", "sentence"):
        table.add_column(overflow="fold")
    for finding in findings:
        table.add_row(cell(finding.question), cell(finding.answer, STYLES[finding.answer]), cell(finding.sentence))
    console.print(table)
    for line in texts:
        console.show_line(line)


def _divergence(what: str, first: Divergence) -> list[str]:
    at_step = "" if first.step is None else f" at step {first.step}"
    values = f"expected {value(first.expected)}, found {value(first.found)}"
    return [f"{what}: differs{at_step}: {where(first)}: {values}", f"the usual cause: {first.cause}"]


def lines(results: CheckResults) -> list[str]:
    """Returns the verdict, the first divergence and its cause, and where the records are."""
    name = Path(results.script).name
    ranks = f"{results.ranks} rank{'' if results.ranks == 1 else 's'}"
    first = results.first_divergence
    texts = [f"note: {note}" for note in results.notes]
    if first:
        texts += _divergence(f"{name} on {ranks}", first)
    elif results.answer == "right":
        warned = sum(each.answer == "warning" for each in results.findings)
        but = f", and {warned} warning{'' if warned == 1 else 's'}, above" if warned else ""
        texts.append(f"{name} on {ranks}: {results.steps} steps, nothing wrong was seen{but}")
    else:
        texts.append(f"{name} on {ranks}: unknown: what a proof needs could not be judged")
    return [
        "",
        *(sentence(text) for text in texts),
        f"records: {results.folder} (recording took {results.record_share:.0%} of the steps)",
    ]
