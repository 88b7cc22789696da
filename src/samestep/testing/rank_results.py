"""What became of a test on each of its ranks, with what they printed, merged into the reports of one test."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from _pytest._code.code import (
    ExceptionChainRepr,
    ExceptionRepr,
    ReprEntryNative,
    ReprFileLocation,
    ReprTraceback,
)


@dataclass(frozen=True)
class Printed:
    """A part of what a process printed. label: 'rank 1', or 'threads'."""

    label: str
    out: str = ""
    err: str = ""


class Output:
    """Reads the two files that receive a process's stdout and stderr. paths: none under --pdb, which uses no files.

    live: print them as they grow, and take nothing.
    """

    def __init__(self, label: str, paths: Sequence[Path], live: bool) -> None:
        self.label, self._paths, self._live = label, paths, live
        self._taken, self._shown = [0, 0], [0, 0]

    def take(self, until: tuple[int, int] | None = None) -> Printed:
        """Returns what has been printed since the last call, up to these sizes in bytes of the two files."""
        if not self._paths or self._live:
            return Printed(self.label)
        texts = []
        for number, path in enumerate(self._paths):
            data = _read(path, self._taken[number], until[number] if until else None)
            self._taken[number] += len(data)
            texts.append(data.decode(errors="replace"))
        return Printed(self.label, *texts)

    def show(self, unfinished: bool = False) -> None:
        """Prints each new line after its rank, where pytest captures nothing. unfinished: a partial line too."""
        if not self._live:
            return
        for number, (path, stream) in enumerate(zip(self._paths, (sys.stdout, sys.stderr))):
            data = _read(path, self._shown[number])
            if not unfinished:
                data = data[: data.rfind(b"\n") + 1]
            self._shown[number] += len(data)
            for line in data.decode(errors="replace").splitlines():
                print(f"[{self.label}] {line}", file=stream)


def _read(path: Path, begin: int, end: int | None = None) -> bytes:
    if not path.exists():  # the process has not begun
        return b""
    with open(path, "rb") as file:
        file.seek(begin)
        return file.read() if end is None else file.read(max(0, end - begin))


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


PHASES = ("setup", "call", "teardown")
Chain = list[tuple[ReprTraceback, ReprFileLocation | None, str | None]]
# Outcomes that fail a test, the likely causes first: a rank that died makes the others fail, too.
FAILED = ("died", "failed", "ended", "stopped")


def merged(item: pytest.Item, results: Sequence[RankResult]) -> list[pytest.TestReport]:
    """Returns the reports of a test from those of its ranks: of its setup, of its call where it came to it, of its
    teardown. A test whose ranks differ has failed."""
    setups = [result.reports.get("setup") for result in results]
    first = "call" if all(setup and setup.passed for setup in setups) else "setup"
    reports = [_report(item, results, "setup", "passed", None)] if first == "call" else []
    outcomes = {result.outcome() for result in results}
    decisive = results[0].decisive()
    if len(outcomes) == 1 and not outcomes & set(FAILED) and decisive:
        reports.append(_report(item, results, first, decisive.outcome, decisive.longrepr))
        if hasattr(decisive, "wasxfail"):
            reports[-1].wasxfail = decisive.wasxfail
    else:
        reports.append(_report(item, results, first, "failed", _shown(item, results)))
    torn = [result for result in results if (report := result.reports.get("teardown")) and report.failed]
    chain = [part for result in torn for part in _chain(item, [result], result.reports["teardown"].longrepr)]
    outcome = "failed" if torn else "passed"
    reports.append(_report(item, results, "teardown", outcome, ExceptionChainRepr(chain) if chain else None))
    return reports


def failure(item: pytest.Item, sentence: str) -> list[pytest.TestReport]:
    """Returns the reports of a test that could not run."""
    chain = _native(item, sentence, f"{sentence}\n")
    return [
        _report(item, [], "setup", "failed", ExceptionChainRepr(chain)),
        _report(item, [], "teardown", "passed", None),
    ]


def _report(
    item: pytest.Item, results: Sequence[RankResult], phase: str, outcome: str, longrepr: object
) -> pytest.TestReport:
    """Builds the report of a phase, with what each rank printed in it."""
    reports = [report for result in results if (report := result.reports.get(phase))]
    return pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords=dict.fromkeys(item.keywords, 1),
        outcome=outcome,  # type: ignore[arg-type]
        longrepr=longrepr,  # type: ignore[arg-type]
        when=phase,  # type: ignore[arg-type]
        sections=list(_sections(results, phase)),
        duration=max((report.duration for report in reports), default=0.0),
        start=min((report.start for report in reports), default=0.0),
        stop=max((report.stop for report in reports), default=0.0),
        user_properties=reports[0].user_properties if reports else (),
    )


def _sections(results: Sequence[RankResult], until: str) -> Iterator[tuple[str, str]]:
    """Yields what each rank printed and logged, up to and with a phase, as pytest's own reports hold it."""
    phases = PHASES[: PHASES.index(until) + 1]
    for result in results:
        label = _label([result])
        for phase, printed in result.printed:
            if phase in phases:
                for stream, text in (("stdout", printed.out), ("stderr", printed.err)):
                    if text:
                        yield f"Captured {stream} {phase}, {printed.label}", text
        report = result.reports.get(until)
        yield from ((f"{name}, {label}", text) for name, text in (report.sections if report else ()))


def _shown(item: pytest.Item, results: Sequence[RankResult]) -> ExceptionChainRepr:
    """Shows each failed rank; ranks that failed in the same way together. First how the ranks differ, if they do."""
    chain: Chain = []
    phrases = {result.rank: result.says() for result in results}
    if len(set(phrases.values())) > 1:
        lines = [f"{_label(same)}: {phrase}\n" for phrase, same in _grouped(results, phrases)]
        chain += _native(item, "the ranks differ", "".join(["the ranks differ:\n", *(f"  {line}" for line in lines)]))
    heads: list[ReprFileLocation] = []
    for outcome in FAILED:
        of_it = [result for result in results if result.outcome() == outcome]
        texts = {result.rank: _text(result) for result in of_it}
        for _, same in _grouped(of_it, texts):
            report = same[0].decisive()
            longrepr = report.longrepr if outcome == "failed" and report else _text(same[0])
            part = _chain(item, same, longrepr)
            crash = part[-1][1]
            if crash and (outcome != "stopped" or not heads):
                heads.append(crash)
            chain += part if outcome != "stopped" else []
    if not heads:
        words = "; ".join(f"{_label(same)} {phrase}" for phrase, same in _grouped(results, phrases))
        heads = [replace(_location(item), message=f"the ranks differ: {words}")]
    if not chain:
        chain = _native(item, heads[0].message, f"{heads[0].message}\n")
    summary = replace(heads[0], message="; ".join(head.message.splitlines()[0] for head in heads))
    chain[-1] = (chain[-1][0], summary, None)  # pytest's short summary shows the last one
    return ExceptionChainRepr(chain)


def _text(result: RankResult) -> str:
    """Returns a failed rank's report as text."""
    report = result.decisive()
    if result.outcome() == "failed" and report:
        return report.longreprtext
    return f"{result.problem}\n{result.stack}" if result.problem else result.says()


def _grouped(results: Sequence[RankResult], key: dict[int, str]) -> list[tuple[str, list[RankResult]]]:
    """Puts ranks with the same text together."""
    groups: dict[str, list[RankResult]] = {}
    for result in results:
        groups.setdefault(key[result.rank], []).append(result)
    return list(groups.items())


def _chain(item: pytest.Item, ranks: Sequence[RankResult], longrepr: object) -> Chain:
    """Returns a failure as pytest shows it, with a line before it that names its ranks."""
    label = _label(ranks)
    if isinstance(longrepr, ExceptionChainRepr):
        parts: Chain = list(longrepr.chain)
    elif isinstance(longrepr, ExceptionRepr):
        parts = [(longrepr.reprtraceback, longrepr.reprcrash, None)]
    else:
        text = str(longrepr).strip()
        parts = _native(item, text.splitlines()[0] if text else "", f"{text}\n")
    traceback, crash, description = parts[0]
    head = ReprEntryNative([f"---- {label} ----\n"])
    parts[0] = (replace(traceback, reprentries=[head, *traceback.reprentries]), crash, description)
    traceback, crash, description = parts[-1]
    crash = crash or _location(item)
    return [*parts[:-1], (traceback, replace(crash, message=f"{label}: {crash.message}"), description)]


def _native(item: pytest.Item, message: str, text: str) -> Chain:
    traceback = ReprTraceback([ReprEntryNative([text])], None, "native")
    return [(traceback, replace(_location(item), message=message), None)]


def _location(item: pytest.Item) -> ReprFileLocation:
    path, line, _ = item.location
    return ReprFileLocation(path, (line or 0) + 1, "")


def _label(ranks: Sequence[RankResult]) -> str:
    """Returns 'rank 1', 'ranks 0, 2' or 'ranks 0-7'."""
    numbers = [result.rank for result in ranks]
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"ranks {numbers[0]}-{numbers[-1]}"
    return f"ranks {', '.join(map(str, numbers))}"
