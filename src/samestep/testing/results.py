"""The outcome of a test on each of its ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from samestep.testing.output import Printed

STOPPED = "stopped in a collective, because another rank had failed"


@dataclass
class RankResult:
    """The outcome of a test on one rank.

    reports: pytest's own, by phase. problem: why the rank has not come to the test's end, for a sentence; died: it had
    ended by itself; stack: where it was when it was ended.
    """

    rank: int
    reports: dict[str, pytest.TestReport] = field(default_factory=dict)
    printed: list[tuple[str, Printed]] = field(default_factory=list)
    problem: str = ""
    died: bool = False
    stack: str = ""

    def outcome(self) -> str:
        """Returns 'passed', 'failed', 'skipped', 'xfailed', 'xpassed', 'died', 'ended' or 'stopped'; of the teardown
        only how it ended a rank. stopped: a thread, in a collective, because another rank had failed."""
        if self.problem:
            return "died" if self.died else "ended"
        report = self.decisive()
        if report is None:
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
        if self.problem:
            return self.problem.splitlines()[0]
        if outcome == "stopped":
            return STOPPED
        if outcome == "skipped" and report and isinstance(report.longrepr, tuple):
            return f"skipped ({str(report.longrepr[2]).removeprefix('Skipped: ')})"
        return outcome
