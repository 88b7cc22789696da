"""The parent's side of a fork server: it forks workers that have already imported torch.

A proof's workers may be forked. Measured workers, and workers that use CUDA, start in new interpreters, as a user's do.
There are two servers, because each process has one hash seed for strings: one forks the reference, the other the
ranks. So a job or an engine that iterates over a set of strings differs from the reference, as on two machines. Ranks
of an engine whose library takes long to import have a server of their own, which the ranks' server forks and which then
imports it: no other engine's ranks have that library. The pytest plugin has one, too, for the ranks of its tests.
"""

from __future__ import annotations

import atexit
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from samestep.launch.stacks import place_of
from samestep.message import Message, message
from samestep.records.fork_messages import ForkAnswer, ForkRequest, answer_of, line_of
from samestep.world import connections
from samestep.world.imports import module_arguments
from samestep.world.processes import COMMAND, Patience, die_with_parent, kill, this_command

Purpose = Literal["ranks", "reference", "tests"]
PRELOAD_S = 60.0  # for a library; one that takes longer is imported by each rank itself
SOCKETS = "SAMESTEP_FORK_SERVERS"  # environment variable: the folder with the sockets of running servers


class ForkServer:
    """A fork server: a child of this process, or one that listens at a socket.

    base: the server that forks it, which must be ready; it then imports `preloads` besides. None: it is a new process.
    """

    def __init__(self, purpose: Purpose, *, base: ForkServer | None = None, preloads: Sequence[str] = ()) -> None:
        self._answers: deque[ForkAnswer] = deque()
        self._partial_line = b""
        self._answering = 0  # the pid of the process that forks; 0: not known yet
        self.codes: dict[int, int] = {}  # pid -> exit code, of workers that have ended
        folder = os.environ.get(SOCKETS)
        self._process: subprocess.Popen[bytes] | ForkedWorker | None = None
        self._log = tempfile.NamedTemporaryFile(prefix="samestep-fork-server-")  # noqa: SIM115 - as long as it runs
        if base:
            self._folder = tempfile.TemporaryDirectory(prefix="samestep-")
            self._path = Path(self._folder.name) / purpose
            arguments = ["--fork-server", purpose, "--listen", str(self._path), *preloads]
            self._process = base.fork(arguments, os.environ, Path(self._log.name))
            return
        if folder and (Path(folder) / purpose).exists():
            self._socket = connections.connect(Path(folder) / purpose)
            self._in = self._out = self._socket.fileno()
            return
        self._process = subprocess.Popen(
            [sys.executable, *module_arguments("samestep.worker"), "--fork-server", purpose],
            env=_quiet(purpose) | os.environ | {"OMP_NUM_THREADS": "1", COMMAND: this_command()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,  # the terminal sends Ctrl-C to the parent only
            preexec_fn=die_with_parent,
        )
        assert self._process.stdin and self._process.stdout
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()

    @property
    def pids(self) -> set[int]:
        """The pids of the server's processes; none where another process started it."""
        return {self._process.pid, self._answering} - {0} if self._process else set()

    def is_ready(self, deadline_s: float | None = None) -> bool:
        """Whether the server can fork, once it has imported torch. False where it has failed or has threads.

        Raises TrainingFailed where it has not imported torch within `deadline_s`.
        """
        if not hasattr(self, "_threads"):
            if isinstance(self._process, ForkedWorker) and not self._connected(self._process, deadline_s):
                self._threads = None
                return False
            answer = self._next_answer(deadline_s)
            self._threads = answer.threads if answer else None
            self._answering = answer.pid if answer else 0
        return self._threads == 1

    def fork(self, arguments: Sequence[str], environment: Mapping[str, str], output: Path) -> ForkedWorker:
        """Forks `python -m samestep.worker ARGUMENTS`, and appends its output to the file `output`."""
        line = line_of(ForkRequest(list(arguments), dict(environment), os.getcwd(), str(output)))
        while line:
            line = line[os.write(self._in, line) :]
        answer = self._next_answer()
        if answer is None:
            raise OSError("the fork server has ended")
        return ForkedWorker(self, answer.pid)

    def read_answers(self, timeout_s: float | None = 0) -> bool:
        """Reads the server's answers; waits at most `timeout_s` for the first. False when the server has ended."""
        if not select.select([self._out], [], [], timeout_s)[0]:
            return True
        read = os.read(self._out, 1 << 16)
        *lines, self._partial_line = (self._partial_line + read).split(b"\n")
        for answer in map(answer_of, lines):
            if answer.code is not None:
                self.codes[answer.pid] = answer.code
            else:
                self._answers.append(answer)
        return bool(read)

    def _next_answer(self, deadline_s: float | None = None) -> ForkAnswer | None:
        alive, patience = True, Patience(message("torch_is_being_imported"), self._place, deadline_s=deadline_s)
        while not self._answers and alive:
            alive = self.read_answers(timeout_s=0.5)
            patience.check()
        return self._answers.popleft() if self._answers else None

    def _connected(self, process: ForkedWorker, deadline_s: float | None) -> bool:
        """Connects to a forked server, once it listens. False where it has ended, or takes too long: ranks then import
        the library themselves, and what is wrong with it is told as of theirs."""
        until = time.monotonic() + min(PRELOAD_S, deadline_s or PRELOAD_S)
        while not self._path.exists():
            if process.poll() is not None or time.monotonic() > until:
                return False
            time.sleep(0.01)
        self._socket = connections.connect(self._path)
        self._in = self._out = self._socket.fileno()
        return True

    def _place(self) -> Message | None:
        return place_of(self._process.pid, Path(self._log.name)) if self._process else None

    def close(self) -> None:
        """Ends the server and the workers that it has forked."""
        if hasattr(self, "_socket"):
            self._socket.close()
        if self._process is None:
            return
        if isinstance(self._process, ForkedWorker):
            self._process.kill()
            self._folder.cleanup()
            return
        with suppress(OSError):
            for stream in (self._process.stdin, self._process.stdout):
                if stream:
                    stream.close()
        kill(self._process)  # the kernel then kills its workers
        self._log.close()


def _quiet(purpose: Purpose) -> dict[str, str]:
    """Returns variables that a server has where the user has set no others."""
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    if purpose == "reference":  # of a costly step it uses all cores, which would wait for one another at full load
        quiet["OMP_WAIT_POLICY"] = "PASSIVE"
    return quiet


class ForkedWorker:
    """A forked worker, with the methods of subprocess.Popen that supervise.py uses."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server, self.pid = server, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Returns the exit code; None while the worker is alive."""
        return self._wait(0)

    def wait(self, timeout: float | None = None) -> int:
        """Waits until the worker has ended. Raises subprocess.TimeoutExpired."""
        until = None if timeout is None else time.monotonic() + timeout
        while self._wait(0.05) is None:
            if until is not None and time.monotonic() > until:
                raise subprocess.TimeoutExpired(["samestep.worker"], timeout or 0)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def _wait(self, timeout_s: float) -> int | None:
        if self.returncode is None:
            alive = self.pid in self._server.codes or self._server.read_answers(timeout_s)
            self.returncode = self._server.codes.pop(self.pid, None if alive else -signal.SIGKILL)
        return self.returncode


_servers: dict[tuple[Purpose, tuple[str, ...]], ForkServer] = {}  # by purpose and preloads


def start(*purposes: Purpose) -> None:
    """Starts servers, which import torch meanwhile. Starts none where forking is not safe (macOS, Windows)."""
    for purpose in purposes:
        if is_possible() and (purpose, ()) not in _servers:
            _servers[purpose, ()] = ForkServer(purpose)


def preload(*preloads: tuple[str, ...], deadline_s: float | None = None) -> None:
    """Starts servers of ranks that import these modules meanwhile, where there is one without them. deadline_s: for
    that one to import torch."""
    base = _servers.get(("ranks", ()))
    if base and base.is_ready(deadline_s):
        for modules in preloads:
            with suppress(OSError):  # the server has been killed
                if ("ranks", modules) not in _servers:
                    _servers["ranks", modules] = ForkServer("ranks", base=base, preloads=modules)


def wait(deadline_s: float | None = None) -> None:
    """Waits until all servers have imported what they fork with, and ends those that have not. Raises TrainingFailed as
    ForkServer.is_ready."""
    for purpose, preloads in [*_servers]:
        _ready(purpose, preloads, deadline_s)


def _ready(purpose: Purpose, preloads: tuple[str, ...], deadline_s: float | None) -> ForkServer | None:
    """Returns a server once it has imported what it forks with; None where it has not. One that `preloads` kept from it
    is ended, so that ranks which import these themselves have the machine."""
    server = _servers.get((purpose, preloads))
    if server is None or server.is_ready(deadline_s):
        return server
    if preloads:
        _servers.pop((purpose, preloads)).close()
    return None


def is_possible() -> bool:
    """Whether this platform can fork a process that has imported torch."""
    return sys.platform == "linux"


def fork(
    purpose: Purpose,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    output: Path,
    deadline_s: float | None = None,
    preloads: tuple[str, ...] = (),
) -> ForkedWorker | None:
    """Forks a worker from the server for this purpose; returns None where workers need new interpreters.

    See ForkServer.fork. deadline_s: for the server to import torch. preloads: of the server, where there is
    one that has them.
    """
    if SOCKETS in os.environ:
        start(purpose)
    server = _ready(purpose, preloads, deadline_s) or _ready(purpose, (), deadline_s)
    if server is None:
        return None
    try:
        return server.fork(arguments, environment, output)
    except OSError:  # the server has been killed
        return None


def pids() -> set[int]:
    """Returns the pids of the servers that this process has started."""
    return set().union(*(server.pids for server in _servers.values()))


def close(*purposes: Purpose) -> None:
    """Ends the servers for these purposes; all of them by default."""
    for key in sorted((key for key in _servers if not purposes or key[0] in purposes), reverse=True):
        _servers.pop(key).close()  # those that another forked come first


atexit.register(close)


@contextmanager
def running(*purposes: Purpose) -> Iterator[None]:
    """Runs servers during the block."""
    try:
        start(*purposes)
        yield
    finally:
        close()
