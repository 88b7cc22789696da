"""What a test came to on each of its ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from samestep.testing.output import Printed

STOPPED = "was stopped in a collective, because another rank had failed"


@dataclass
class RankResult:
    """What a test came to on one rank.

    reports: pytest's own, by phase. problem: why the rank has not ended by itself, for a sentence; stack: where it was
    then. stopped: ended in a collective by another rank's failure.
    """

    rank: int
    reports: dict[str, pytest.TestReport] = field(default_factory=dict)
    printed: list[tuple[str, Printed]] = field(default_factory=list)
    problem: str = ""
    stack: str = ""
    stopped: bool = False

    def outcome(self) -> str:
        """Returns 'passed', 'failed', 'skipped', 'xfailed', 'xpassed', 'stopped' or 'ended', teardown left out."""
        if self.problem:
            return "ended"
        report = self.decisive()
        if report is None or self.stopped:
            return "stopped"
        if hasattr(report, "wasxfail"):
            return {"skipped": "xfailed", "passed": "xpassed"}.get(report.outcome, "failed")
        return str(report.outcome)

    def decisive(self) -> pytest.TestReport | None:
        """Returns the report of the call, or of a setup that did not pass."""
        setup = self.reports.get("setup")
        return setup if setup and not setup.passed else self.reports.get("call")

    def clean(self) -> bool:
        """Whether the rank has raised nothing and hangs nowhere, so that its process can run another test."""
        teardown = self.reports.get("teardown")
        return self.outcome() in ("passed", "skipped", "xpassed") and not (teardown and teardown.failed)

    def says(self) -> str:
        """Returns the outcome as one phrase."""
        report, outcome = self.decisive(), self.outcome()
        if outcome == "ended":
            return self.problem.splitlines()[0]
        if outcome == "stopped":
            return STOPPED
        if outcome == "skipped" and report and isinstance(report.longrepr, tuple):
            return f"skipped ({str(report.longrepr[2]).removeprefix('Skipped: ')})"
        return outcome
