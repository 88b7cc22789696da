"""Runs a test on its ranks: sends it to their processes, watches them, and ends those that hang."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait

import pytest

from samestep.errors import UserError
from samestep.launch import rendezvous_address
from samestep.records.rank_tests import Ended, Opened, PhaseReport, RunTest
from samestep.testing.rank_processes import POLL_S, START_S, THREADS, Processes, RankProcess, basetemp_of
from samestep.testing.rank_results import RankResult, failure, merged

SETTLE_S = 1.0  # at least so long the other ranks have once one has failed


@dataclass
class Running:
    """A test that is running. results: of the ranks of each process. done: the processes that have ended the test.

    began: when all ranks had found the test and opened the group, seconds of time.monotonic; until: the deadline.
    """

    test: RunTest
    processes: list[RankProcess]
    until: float
    began: float = field(default_factory=time.monotonic)
    opened: int = 0
    results: dict[int, list[RankResult]] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    hung: set[int] = field(default_factory=set)
    failed_after_s: float | None = None  # since `began`, the first rank

    def __post_init__(self) -> None:
        for process in self.processes:
            ranks = range(self.test.size) if process.number == THREADS else [process.number]
            self.results[process.number] = [RankResult(rank) for rank in ranks]

    def pending(self) -> list[RankProcess]:
        return [process for process in self.processes if process.number not in self.done]

    def overdue_reason(self) -> str:
        """Returns why the ranks that are running are to be ended, for a sentence; '' while they may run."""
        now = time.monotonic()
        if now > self.until:
            return f"had not ended after {self.test.timeout_s:g} s" if self.opened else "had not begun the test in time"
        if self.failed_after_s is not None:
            given_s = max(SETTLE_S, self.failed_after_s)  # ranks do the same work
            if now > self.began + self.failed_after_s + given_s:
                return f"was still running {given_s:.1f} s after another rank had failed or ended"
        return ""


class Pool:
    """Runs the tests of one pytest session that have several ranks."""

    def __init__(self, config: pytest.Config) -> None:
        self._config, self._processes = config, Processes(config)
        self._tests = 0

    def run(self, test: RunTest, debug: bool) -> list[RankResult]:
        """Runs a test. Returns its outcome on each rank. Unless all are clean, their processes end."""
        self._tests += 1
        shared = basetemp_of(self._config) / f"shared{self._tests}"
        shared.mkdir(parents=True)
        numbers = [THREADS] if test.threads else list(range(test.size))
        test = replace(
            test,
            store=str(self._processes.folder / f"store{self._tests}"),
            port=rendezvous_address.free_port("127.0.0.1"),
            shared_folder=str(shared),
        )
        try:
            processes = self._processes.take(numbers, debug)
            until = float("inf") if debug else time.monotonic() + test.timeout_s + START_S
            running = Running(test, processes, until)
            for process in processes:
                process.connection.send(replace(test, rank=max(process.number, 0)))
            self._watch(running)
        except BaseException:  # Ctrl-C, too
            self._processes.end(numbers, hung=numbers)
            raise
        results = [result for number in numbers for result in running.results[number]]
        if debug or not all(result.clean() for result in results):
            self._processes.end(numbers, running.hung)
        return results

    def close(self) -> None:
        """Ends all processes."""
        self._processes.close()

    def _watch(self, running: Running) -> None:
        """Receives what the ranks report until all have ended, the deadline has come, or one has left others alone."""
        try:
            while pending := running.pending():
                ready = wait([process.connection for process in pending], POLL_S)
                for process in pending:
                    if process.connection in ready:
                        self._receive(process, running)
                    process.output.show()
                if running.pending() and (why := running.overdue_reason()):
                    self._stop(running, why)
        except pytest.fail.Exception as error:  # the alarm of pytest-timeout
            self._stop(running, f"was ended: {error}")
        for process in running.processes:
            process.output.show(unfinished=True)
            first = running.results[process.number][0]
            first.printed.append(("call" if "setup" in first.reports else "setup", process.output.take()))

    def _receive(self, process: RankProcess, running: Running) -> None:
        results = running.results[process.number]
        try:
            message = process.connection.recv()
        except (EOFError, OSError):
            message = Ended(f"{process.describe()} {process.wait_for_end()}")
        if isinstance(message, Opened):
            running.opened += 1
            if running.opened == len(running.processes) and running.until != float("inf"):
                running.began = time.monotonic()
                running.until = running.began + running.test.timeout_s
        elif isinstance(message, PhaseReport):
            hook = self._config.hook
            report = hook.pytest_report_from_serializable(config=self._config, data=dict(message.report))
            result = next(result for result in results if result.rank == message.rank)
            result.reports[report.when] = report
            result.printed.append((report.when, process.output.take((message.out, message.err))))
        elif isinstance(message, Ended):
            running.done.add(process.number)
            for result in results:
                result.problem, result.died = message.problem, bool(message.problem)
        failed = not all(result.clean() for result in results if result.decisive() or process.number in running.done)
        if failed and running.failed_after_s is None:
            running.failed_after_s = time.monotonic() - running.began

    def _stop(self, running: Running, why: str) -> None:
        """Notes what the ranks that have not ended are doing; their processes will be killed."""
        pending = running.pending()
        for process in pending:
            process.ask_state()
        for process in pending:
            states = process.state()
            for result in running.results[process.number]:
                state = states.get(result.rank)
                waits = f"; it waits in {state.collective}" if state and state.collective else ""
                result.problem = f"{process.describe()} {why}{waits}"
                result.stack = state.stack if state else ""
            running.done.add(process.number)
            running.hung.add(process.number)


def run_protocol(pool: Pool, item: pytest.Item, nextitem: pytest.Item | None, mark: pytest.Mark) -> None:
    """Runs a test on its ranks in place of pytest's own protocol, and reports it as one test."""
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _reports(pool, item, nextitem, mark):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)


def _reports(pool: Pool, item: pytest.Item, nextitem: pytest.Item | None, mark: pytest.Mark) -> list[pytest.TestReport]:
    size, threads = int(mark.args[0]), bool(mark.kwargs.get("threads"))
    debug = bool(item.config.getoption("usepdb") or item.config.getoption("trace"))
    if debug and size > 1:
        sentence = f"--pdb and --trace debug one rank, and this test has {size}: write @ranks(1) while you debug it"
        return failure(item, sentence)
    test = RunTest(
        nodeid=item.nodeid,
        file=str(item.path),
        rank=0,
        size=size,
        threads=threads,
        backend=mark.kwargs.get("backend", "gloo"),
        timeout_s=float(mark.kwargs.get("timeout", 60)),
        keep=_shared_collectors(item, _next_there(item, nextitem, mark)),
        store="",
        port=0,
        shared_folder="",
    )
    try:
        if not debug:
            return merged(item, pool.run(test, debug))
        with _terminal_lent(item.config):
            return merged(item, pool.run(test, debug))
    except (pytest.fail.Exception, UserError, OSError) as error:
        return failure(item, str(error))


def _next_there(item: pytest.Item, nextitem: pytest.Item | None, mark: pytest.Mark) -> pytest.Item | None:
    """Returns the next test that all processes of this one run, too; None: there is none, and their fixtures end now.

    Else a fixture would end with the session, where no test can report that its teardown fails. An xdist worker knows
    no more than the next test.
    """
    size, threads = int(mark.args[0]), bool(mark.kwargs.get("threads"))
    later = [nextitem] if nextitem else []
    if nextitem and not hasattr(item.config, "workerinput") and item in item.session.items:
        later = item.session.items[item.session.items.index(item) + 1 :]
    for item in later:
        its = item.get_closest_marker(mark.name)
        if its and bool(its.kwargs.get("threads")) == threads and (threads or int(its.args[0]) >= size):
            return item
    return None


def _shared_collectors(item: pytest.Item, nextitem: pytest.Item | None) -> int:
    """Returns how many collectors, from the session down, two tests share; 0 where there is no next test."""
    pairs = zip(item.listchain()[:-1], nextitem.listchain()) if nextitem else ()
    return sum(1 for first, second in pairs if first is second)


@contextmanager
def _terminal_lent(config: pytest.Config) -> Iterator[None]:
    """Lets a rank's process read from and print on the terminal; Ctrl-C is meant for it."""
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture:
        capture.suspend(in_=True)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if capture:
            capture.resume()
