"""The processes that run tests as ranks: started once, kept between tests, ended by pid."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest

from samestep.launch import fork_client
from samestep.launch.fork_client import ForkedWorker
from samestep.records.rank_tests import DUMP_STACKS, AskState, ProcessState, PytestSession, RankState
from samestep.testing.rank_results import Output
from samestep.world import connections
from samestep.world.imports import module_arguments
from samestep.world.processes import kill
from samestep.world.regular_files import open_new

START_S = 300.0  # for a process to import torch and connect
STATE_S = 3.0  # for a rank to say what it is doing
CLOSE_S = 3.0  # for an idle process to tear down its fixtures and end
POLL_S = 0.05
THREADS = -1  # the number of the process whose threads are ranks
AnyProcess = ForkedWorker | subprocess.Popen[bytes]


@dataclass
class RankProcess:
    """A process that runs tests as rank `number`."""

    number: int
    process: AnyProcess
    connection: Connection
    folder: Path
    output: Output

    def describe(self) -> str:
        return f"process {self.process.pid}"

    def wait_for_end(self) -> str:
        """Waits for the end of a process that has closed its connection. Returns how it ended, for a sentence."""
        with suppress(subprocess.TimeoutExpired):
            code = self.process.wait(CLOSE_S)
            if code >= 0:
                return f"exited with code {code} during the test"
            return f"was killed by signal {-code} ({signal.Signals(-code).name})"
        return "closed its connection to pytest"

    def ask_state(self) -> None:
        with suppress(OSError):
            self.connection.send(AskState())

    def state(self) -> Mapping[int, RankState]:
        """Returns what each rank of this process is doing, after ask_state.

        A process whose test does not let Python's threads run has its stack dumped by faulthandler.
        """
        until = time.monotonic() + STATE_S
        with suppress(EOFError, OSError):
            while self.connection.poll(max(0.0, until - time.monotonic())):
                message = self.connection.recv()
                if isinstance(message, ProcessState):
                    return {state.rank: state for state in message.ranks}
        dumped, until = self.folder / "s.stack", time.monotonic() + STATE_S
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, DUMP_STACKS)
        while time.monotonic() < until and not (dumped.exists() and dumped.stat().st_size):
            time.sleep(POLL_S)
        time.sleep(POLL_S)  # for the rest of what it writes
        rank = max(self.number, 0)
        return {rank: RankState(rank, dumped.read_text() if dumped.exists() else "", "")}

    def kill(self, descendants: bool = False) -> None:
        """Kills it. descendants: and what it has started, which would outlive it."""
        started: list[psutil.Process] = []
        with suppress(psutil.Error):
            started = psutil.Process(self.process.pid).children(recursive=True) if descendants else []
        self.connection.close()
        for process in started:
            with suppress(psutil.Error):
                process.kill()
        kill(self.process)


class Processes:
    """The processes of one pytest session, by their number: the rank, or THREADS."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._folder = tempfile.TemporaryDirectory(prefix="samestep-tests-", ignore_cleanup_errors=True)
        self.folder = Path(self._folder.name)
        self._kept: dict[int, RankProcess] = {}
        self._started = 0

    def take(self, numbers: Sequence[int], debug: bool) -> list[RankProcess]:
        """Returns the processes with these numbers. Starts those that are missing or have ended since."""
        for number in numbers:
            if number in self._kept and self._kept[number].process.poll() is not None:
                self._kept.pop(number).connection.close()
        started = [(number, self._start(debug)) for number in numbers if number not in self._kept]
        try:
            for number, (process, folder, listening) in started:
                connection = _connected(process, folder, listening)
                self._kept[number] = self._begin_session(number, process, connection, folder, debug)
        except BaseException:  # Ctrl-C, too
            for number, (process, _, listening) in started:
                listening.close()
                if number not in self._kept:
                    process.kill()
            raise
        return [self._kept[number] for number in numbers]

    def _start(self, debug: bool) -> tuple[AnyProcess, Path, socket.socket]:
        """Starts a process. Returns it with its folder and the socket to which it will connect."""
        self._started += 1
        folder = self.folder / f"p{self._started}"
        folder.mkdir(mode=0o700)
        listening = connections.listen(folder / "s")
        arguments = ["--test-rank", str(folder / "s")]
        if not debug:
            fork_client.start("tests")
            forked = fork_client.fork("tests", arguments, os.environ, folder / "log")
            if forked is not None:
                return forked, folder, listening
        command = [sys.executable, *module_arguments("samestep.worker"), *arguments]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        if debug:  # it has the terminal
            return subprocess.Popen(command, env=environment), folder, listening
        with open_new(folder / "log") as log:
            alone = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        return alone, folder, listening

    def _begin_session(
        self, number: int, process: AnyProcess, connection: Connection, folder: Path, debug: bool
    ) -> RankProcess:
        """Tells a new process how the command's pytest session is made."""
        arguments = [*map(str, self._config.invocation_params.args)]
        arguments += ["--no-cov"] * self._config.pluginmanager.hasplugin("pytest_cov")
        label = "threads" if number == THREADS else f"rank {number}"
        paths = [] if debug else [folder / "out", folder / "err"]
        out, err = map(str, paths) if paths else (None, None)
        basetemp = str(basetemp_of(self._config) / f"{label.replace(' ', '')}-{folder.name}")
        connection.send(PytestSession((*arguments,), (*sys.path,), basetemp, out, err))
        live = self._config.getoption("capture") in ("no", "tee-sys")
        return RankProcess(number, process, connection, folder, Output(label, paths, live))

    def end(self, numbers: Collection[int], hung: Collection[int] = ()) -> None:
        """Ends processes. hung: those to kill at once; the others may tear their fixtures down first."""
        ending = [self._kept.pop(number) for number in numbers if number in self._kept]
        for process in ending:
            if process.number in hung:
                process.kill(descendants=True)
            process.connection.close()
        until = time.monotonic() + CLOSE_S
        for process in ending:
            with suppress(subprocess.TimeoutExpired):
                process.process.wait(max(0.01, until - time.monotonic()))
            process.kill()

    def close(self) -> None:
        """Ends all processes and the server that forks them, and removes their folder."""
        self.end(list(self._kept))
        fork_client.close("tests")
        self._folder.cleanup()


def _connected(process: AnyProcess, folder: Path, listening: socket.socket) -> Connection:
    """Returns the connection of a new process. Fails the test where the process ends before."""
    with listening:
        listening.settimeout(POLL_S)
        until = time.monotonic() + START_S
        while True:
            with suppress(TimeoutError):
                accepted = connections.accept(listening)
                accepted.setblocking(True)
                return Connection(accepted.detach())
            if process.poll() is not None or time.monotonic() > until:
                process.kill()
                log = folder / "log"
                printed = log.read_text(errors="replace") if log.exists() else ""
                pytest.fail(f"the process of a rank could not be started\n{printed}", pytrace=False)


def basetemp_of(config: pytest.Config) -> Path:
    """Returns the folder that holds the session's tmp_path folders."""
    return Path(config._tmp_path_factory.getbasetemp())  # type: ignore[attr-defined]
