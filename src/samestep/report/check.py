"""Prints the results of `samestep check`: a line a question, and the first divergence with its cause."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from samestep.records.script import CheckResults
from samestep.report.sentences import sentence, value, where

STYLES = {"right": "green", "differs": "bold red", "unknown": "yellow"}


def show_check(results: CheckResults) -> None:
    """Prints the answers and the verdict on stdout."""
    console = Console()
    console = console if console.is_terminal else Console(width=100)
    table = Table(box=None, pad_edge=False, show_header=False)
    for finding in results.findings:
        table.add_row(finding.question, Text(finding.answer, style=STYLES[finding.answer]), Text(finding.sentence))
    console.print(table)
    for line in lines(results):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def lines(results: CheckResults) -> list[str]:
    """Returns the verdict, the first divergence and its cause, and where the records are."""
    name = Path(results.script).name
    ranks = f"{results.ranks} rank{'' if results.ranks == 1 else 's'}"
    first = results.first_divergence
    texts = [f"note: {note}" for note in results.notes]
    if first:
        at_step = "" if first.step is None else f" at step {first.step}"
        values = f"expected {value(first.expected)}, found {value(first.found)}"
        texts += [f"{name} on {ranks}: differs{at_step}: {where(first)}: {values}", f"the usual cause: {first.cause}"]
    elif results.answer == "right":
        texts.append(f"{name} on {ranks}: {results.steps} steps, nothing wrong was seen")
    else:
        texts.append(f"{name} on {ranks}: unknown: what a proof needs could not be judged")
    return [
        "",
        *(sentence(text) for text in texts),
        f"records: {results.folder} (recording took {results.record_share:.0%} of the steps)",
    ]
