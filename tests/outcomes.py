"""A pytest plugin: writes which tests a run has collected, begun and ended, and how, as lines of JSON.

    python -m pytest --outcomes=FILE [--minutes=40 --always=tests/test_new.py]

With xdist it writes what the controller hears of its workers, so that a worker's crash does not take the lines with it.
`.ci/lanes.py` reads the lines.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

BEGAN_S = time.monotonic()
LEFT_OUT = "NOT RUN: the minutes of this run are over"
SKIPPED_FILES = "skipped_files"  # of what an xdist worker tells its controller


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, help="the file to which the lines are written")
    parser.addoption("--minutes", type=float, help="tests that have not begun after so many minutes are skipped")
    parser.addoption("--always", action="append", default=[], help="a file whose tests are not skipped for that reason")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # of xdist; a rank of the plugin's tests has no output
        if hasattr(config, "workeroutput"):
            config.pluginmanager.register(WorkerOutcomes(config))
    elif config.getoption("--outcomes"):
        config.pluginmanager.register(Outcomes(config.getoption("--outcomes")))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    minutes = item.config.getoption("--minutes")
    file = item.nodeid.partition("::")[0]
    if minutes is not None and time.monotonic() - BEGAN_S > 60 * minutes and file not in item.config.option.always:
        pytest.skip(LEFT_OUT)


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Returns why a test was skipped, or the first line of what it failed with."""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    return (crash.message if crash else report.longreprtext).strip().partition("\n")[0]


class Outcomes:
    """Writes the lines: in the process that the user has started."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "w", buffering=1)  # noqa: SIM115 - open as long as pytest runs

    def _write(self, **facts: object) -> None:
        self._file.write(f"{json.dumps(facts)}\n")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:
            self._write(collected=[item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._write(collected=list(ids))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(not_collected=report.nodeid, why=reason_of(report))
        elif report.skipped:
            self._write(skipped_file=report.nodeid, why=reason_of(report))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(begun=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        outcome = "passed" if hasattr(report, "wasxfail") and not report.failed else report.outcome
        why = "" if outcome == "passed" else reason_of(report)
        self._write(test=report.nodeid, when=report.when, outcome=outcome, why=why)

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str) -> None:
        self._write(crashed=crashitem)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        if error:
            self._write(problem=f"the worker {node.gateway.id} ended: {error}".partition("\n")[0])
        for nodeid, why in getattr(node, "workeroutput", {}).get(SKIPPED_FILES, []):
            self._write(skipped_file=nodeid, why=why)

    def pytest_internalerror(self, excrepr: object) -> None:
        self._write(problem=f"INTERNALERROR: {str(excrepr).strip().splitlines()[-1]}")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self._write(exit=int(exitstatus))


class WorkerOutcomes:
    """Tells xdist's controller which files a worker has skipped whole: of these it hears nothing else."""

    def __init__(self, config: pytest.Config) -> None:
        self._skipped: list[tuple[str, str]] = []
        config.workeroutput[SKIPPED_FILES] = self._skipped

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._skipped.append((report.nodeid, reason_of(report)))
