"""A process that runs tests as a rank: it has a pytest session of its own and receives the tests to run, one by one.

It collects a test's file, evaluates its fixtures and runs it as pytest does, and sends pytest's reports to the process
that the user started; see testing/. Each test has a new process group.
"""

from __future__ import annotations

import faulthandler
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from _pytest.config import _prepareconfig
from _pytest.main import wrap_session
from _pytest.skipping import evaluate_skip_marks
from torch._C._distributed_c10d import FileStore

from samestep.rank import flight_recorder
from samestep.records.rank_tests import (
    DUMP_STACKS,
    AskState,
    Ended,
    Opened,
    PhaseReport,
    ProcessState,
    PytestSession,
    RunTest,
)
from samestep.tasks import thread_ranks
from samestep.world import network
from samestep.world.connections import connect
from samestep.world.processes import die_with_parent
from samestep.world.regular_files import end_of, open_new

PLUGIN = "samestep-rank"
GROUP_TIMEOUT_S = 60.0  # of collectives, after the test's own timeout, which names every rank
# The options that belong to the command alone, and what a rank has in their place.
OPTIONS = {
    "looponfail": False,
    "dist": "no",
    "distload": False,
    "loadgroup": False,
    "numprocesses": None,
    "maxprocesses": None,
    "tx": [],
    "maxfail": 0,
    "lf": False,
    "failedfirst": False,
    "newfirst": False,
    "stepwise": False,
    "cacheclear": False,
    "collectonly": False,
    "durations": None,
}


def run(address: str) -> None:
    """Connects to the socket at `address`, and runs tests until the connection is closed."""
    die_with_parent()
    connection = Connection(connect(Path(address)).detach())
    settings = connection.recv()
    assert isinstance(settings, PytestSession)
    _print_into(settings)
    faulthandler.register(DUMP_STACKS, file=open_new(Path(f"{address}.stack")), all_threads=True)
    sys.path[:] = settings.sys_path
    flight_recorder.enable(1000)
    # The fork server has imported the plugins; pytest would warn that it cannot rewrite their asserts.
    quiet = ["--capture=no", "-qq", "--no-header", "--no-summary", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    config = _prepareconfig([*settings.arguments, *quiet], None)
    if settings.out is not None:
        config.pluginmanager.unregister(name="terminal")  # before it prints; its options are known by now
    for name, value in ({**OPTIONS, "usepdb": settings.out is None, "basetemp": settings.basetemp}).items():
        if hasattr(config.option, name):
            setattr(config.option, name, value)
    # Plugins that write one file for the whole command do not write it where this attribute exists.
    worker = {"workerid": os.environ.get("PYTEST_XDIST_WORKER", "master"), "workercount": 1}
    config.workerinput = {**worker, "testrunuid": "", "mainargv": sys.argv}  # type: ignore[attr-defined]
    rank = Rank(connection, debugs=settings.out is None)
    config.pluginmanager.register(rank, PLUGIN)
    wrap_session(config, lambda config, session: rank.loop(session))


def _print_into(settings: PytestSession) -> None:
    for number, (path, stream) in enumerate(((settings.out, sys.stdout), (settings.err, sys.stderr)), start=1):
        if path is not None:
            file = end_of(Path(path))
            os.dup2(file, number)
            os.close(file)
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


class Rank:
    """A plugin of the rank's pytest session: runs the tests that arrive, and sends their reports."""

    def __init__(self, connection: Connection, *, debugs: bool) -> None:
        self._debugs = debugs
        self._connection, self._sending = connection, threading.Lock()
        self._tests: queue.Queue[RunTest | None] = queue.Queue()
        self._items: dict[str, pytest.Item] = {}
        self._not_collected: list[str] = []
        self._thread_calls: dict[int, pytest.CallInfo[None] | None] = {}
        self._failed_subtests: list[pytest.TestReport] = []
        self._pid = os.getpid()
        self.test: RunTest | None = None
        threading.Thread(target=self._receive, name="samestep", daemon=True).start()

    def _send(self, message: object) -> None:
        if os.getpid() != self._pid:
            os._exit(1)  # a copy that the test has forked, and whose test has returned, must not answer for the rank
        with self._sending, suppress(BrokenPipeError):
            self._connection.send(message)

    def _receive(self) -> None:
        """Receives tests for the main thread, and answers what the ranks are doing while that one is busy."""
        with suppress(EOFError, OSError):
            while True:
                message = self._connection.recv()
                if isinstance(message, AskState):
                    self._send(ProcessState(thread_ranks.states(self.test)))
                else:
                    self._tests.put(message)
        self._tests.put(None)

    def loop(self, session: pytest.Session) -> None:
        """Runs tests until the connection is closed."""
        while test := self._tests.get():
            self.test = test
            try:
                problem = self._run(session, test)
            except pytest.exit.Exception as error:
                problem = f"called pytest.exit: {error.msg}"
            except KeyboardInterrupt as error:  # raised by the test: the terminal's Ctrl-C comes to pytest's process
                if self._debugs:
                    raise
                frame = traceback.extract_tb(error.__traceback__)[-1]
                problem = f"KeyboardInterrupt was raised at {frame.filename}:{frame.lineno}, in {frame.name}"
            except Exception:
                problem = traceback.format_exc()
            self._send(Ended(problem))

    def _run(self, session: pytest.Session, test: RunTest) -> str:
        """Runs a test. Returns why it could not run, or ''."""
        close_group()  # of the last test: by now all of its ranks have left it
        set_environment(test)
        item = self._find(session, test)
        if item is None:
            return "\n".join(self._not_collected) or (
                f"no test named {test.nodeid} is collected here; a test's parameters must be the same in every process"
            )
        if evaluate_skip_marks(item) is None and (problem := open_group(test)):
            return problem
        session._setupstate.teardown_exact(item)  # fixtures that the command expected to need again
        self._send(Opened())
        next_node = item.listchain()[test.keep - 1] if test.keep else None
        self._thread_calls, self._failed_subtests = {}, []
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=next_node)
        return ""

    def _find(self, session: pytest.Session, test: RunTest) -> pytest.Item | None:
        """Returns the test; collects its file where that was not the last one. None: it is not there."""
        names = (test.nodeid, test.nodeid.rpartition("@")[0])  # xdist adds '@GROUP'
        if not set(names) & set(self._items):
            self._not_collected = []
            self._items = {item.nodeid: item for item in session.perform_collect([test.file])}
        return next((self._items[name] for name in names if name in self._items), None)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._not_collected.append(report.longreprtext)

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        """Calls the test's function once in each thread, where the ranks are threads."""
        assert self.test
        if not self.test.threads:
            return None
        arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
        self._thread_calls = thread_ranks.call(self.test.size, lambda: pyfuncitem.obj(**arguments))
        for call in self._thread_calls.values():
            if call and call.excinfo:
                raise call.excinfo.value
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        assert self.test
        if hasattr(report, "context"):  # of a subtest; the test's own report follows
            self._failed_subtests += [report] if report.failed else []
            return
        config, item = self._config(), self._items.get(report.nodeid)
        reports = {self.test.rank: report}
        if self.test.threads:
            reports = dict.fromkeys(range(self.test.size), report)
            if report.when == "call" and self._thread_calls and item:
                reports = {
                    rank: item.ihook.pytest_runtest_makereport(item=item, call=call)
                    for rank, call in self._thread_calls.items()
                    if call
                }
        sys.stdout.flush()
        sys.stderr.flush()
        printed = [os.fstat(number).st_size for number in (1, 2)]
        for rank, report_of_rank in reports.items():
            if report.when == "call" and self._failed_subtests:
                add_subtests(report_of_rank, self._failed_subtests)
            data = config.hook.pytest_report_to_serializable(config=config, report=report_of_rank)
            data["user_properties"] = [(name, value) for name, value in data["user_properties"] if is_plain(value)]
            self._send(PhaseReport(rank, data, *printed))

    def _config(self) -> pytest.Config:
        return next(iter(self._items.values())).config


def add_subtests(report: pytest.TestReport, failed: Sequence[pytest.TestReport]) -> None:
    """Makes a test fail whose subtests have failed, and shows them in its report."""
    texts = [f"contains {len(failed)} failed subtest{'s' if len(failed) > 1 else ''}"]
    texts += [f"---- {subtest.head_line} ----\n{subtest.longreprtext}" for subtest in failed]
    report.longrepr = "\n".join([*texts, *([report.longreprtext] if report.failed else [])])
    report.outcome = "failed"


def is_plain(value: object) -> bool:
    """Whether a value can be received by a process that has not imported torch."""
    return value is None or isinstance(value, (bool, int, float, str))


def set_environment(test: RunTest) -> None:
    """Sets the variables that torchrun sets for a rank."""
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # the fork server ignores it
    os.environ |= {"RANK": str(test.rank), "LOCAL_RANK": str(test.rank)}
    os.environ |= {"WORLD_SIZE": str(test.size), "LOCAL_WORLD_SIZE": str(test.size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(test.port)}
    network.choose(os.environ, "127.0.0.1")


def open_group(test: RunTest) -> str:
    """Opens the test's process group, where it has one. Returns why that failed, or ''."""
    if test.threads or test.backend is None:
        return ""
    if not dist.is_backend_available(test.backend):
        return f"this torch has no backend {test.backend!r}; give one that torch.distributed has, such as 'gloo'"
    if test.backend == "nccl":
        if torch.cuda.device_count() < test.size:
            return f"backend='nccl' needs {test.size} GPUs, and this machine has {torch.cuda.device_count()}"
        torch.cuda.set_device(test.rank)
    try:
        store = FileStore(test.store, test.size)
        limit = timedelta(seconds=test.timeout_s + GROUP_TIMEOUT_S)
        dist.init_process_group(test.backend, store=store, rank=test.rank, world_size=test.size, timeout=limit)
    except Exception as error:
        return f"the process group could not be opened: {type(error).__name__}: {error}"
    return ""


def close_group() -> None:
    """Closes the process group, where one is open."""
    if dist.is_initialized():
        dist.destroy_process_group()
