"""The parent's side of a fork server: workers that need not import torch again.

A proof's workers may be forked; what is measured, and what uses CUDA, starts afresh, as users start it. There are two
servers, because Python's hash seed is the process's: the reference comes from one and the ranks from the other, so
that a job or an engine whose order comes from a set of strings differs, as it would on two machines.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from samestep.world.orphans import COMMAND, die_with_parent, this_command

Of = Literal["ranks", "reference"]
SOCKETS = "SAMESTEP_FORK_SERVERS"  # the environment's name for a folder of sockets of servers that run already


class ForkServer:
    """A server, started by this process, or one that listens at a socket."""

    def __init__(self, of: Of) -> None:
        self._answers: deque[dict[str, Any]] = deque()
        self._begun = b""
        self.codes: dict[int, int] = {}  # pid -> exit code, of workers that have ended
        folder = os.environ.get(SOCKETS)
        self._process: subprocess.Popen[bytes] | None = None
        if folder:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(str(Path(folder) / of))
            self._in = self._out = self._socket.fileno()
            return
        self._process = subprocess.Popen(
            [sys.executable, "-m", "samestep.worker", "--fork-server", of],
            env={"TORCH_CPP_LOG_LEVEL": "ERROR"} | os.environ | {"OMP_NUM_THREADS": "1", COMMAND: this_command()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches us alone
            preexec_fn=die_with_parent,
        )
        assert self._process.stdin and self._process.stdout
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()

    @property
    def pid(self) -> int | None:
        """The server's pid; None where another process has started it."""
        return self._process.pid if self._process else None

    def is_ready(self) -> bool:
        """Whether it can fork: waits until it has imported torch. False where it has failed, or has threads."""
        if not hasattr(self, "_threads"):
            self._threads = self._next("threads", timeout_s=None)
        return self._threads == 1

    def fork(self, arguments: Sequence[str], environment: Mapping[str, str], output: Path) -> ForkedWorker:
        """Forks `python -m samestep.worker ARGUMENTS`; what it prints is appended to `output`."""
        request = {"arguments": list(arguments), "environment": dict(environment), "output": str(output)}
        line = f"{json.dumps({**request, 'folder': os.getcwd()})}\n".encode()
        while line:
            line = line[os.write(self._in, line) :]
        pid = self._next("forked", timeout_s=None)
        if pid is None:
            raise OSError("the fork server has ended")
        return ForkedWorker(self, pid)

    def look(self, timeout_s: float | None = 0) -> bool:
        """Reads what the server has answered, waiting so long for it. False when it has ended."""
        if not select.select([self._out], [], [], timeout_s)[0]:
            return True
        read = os.read(self._out, 1 << 16)
        *lines, self._begun = (self._begun + read).split(b"\n")
        for answer in map(json.loads, lines):
            if "ended" in answer:
                self.codes[answer["ended"]] = answer["code"]
            else:
                self._answers.append(answer)
        return bool(read)

    def _next(self, key: str, timeout_s: float | None) -> int | None:
        alive = True
        while not self._answers and alive:
            alive = self.look(timeout_s)
        return int(self._answers.popleft()[key]) if self._answers else None

    def close(self) -> None:
        """Ends the server, and what it has forked."""
        if self._process is None:
            self._socket.close()
            return
        with suppress(OSError):
            for stream in (self._process.stdin, self._process.stdout):
                if stream:
                    stream.close()
        self._process.kill()  # its workers are told by the kernel
        self._process.wait()


class ForkedWorker:
    """A worker that a server has forked, with the part of subprocess.Popen that supervision needs."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server, self.pid = server, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code; None while it lives."""
        return self._wait(0)

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end. Raises subprocess.TimeoutExpired."""
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
            alive = self.pid in self._server.codes or self._server.look(timeout_s)
            self.returncode = self._server.codes.pop(self.pid, None if alive else -signal.SIGKILL)
        return self.returncode


_servers: dict[Of, ForkServer] = {}


def start(*of: Of) -> None:
    """Starts servers, which import torch from now on. Where forking is not safe (macOS, Windows) there are none."""
    for each in of:
        if is_possible() and each not in _servers:
            _servers[each] = ForkServer(each)
    atexit.register(close)


def is_possible() -> bool:
    """Whether a process that has imported torch can be forked here."""
    return sys.platform == "linux"


def fork(of: Of, arguments: Sequence[str], environment: Mapping[str, str], output: Path) -> ForkedWorker | None:
    """Forks a worker from the server that has been started for this; None where workers must start afresh.

    See ForkServer.fork.
    """
    if SOCKETS in os.environ:
        start(of)
    server = _servers.get(of)
    if server is None or not server.is_ready():
        return None
    try:
        return server.fork(arguments, environment, output)
    except OSError:  # it has been killed
        return None


def pids() -> set[int]:
    """The servers that this process has started."""
    return {server.pid for server in _servers.values() if server.pid}


def close() -> None:
    """Ends the servers."""
    while _servers:
        _servers.popitem()[1].close()


@contextmanager
def started(*of: Of) -> Iterator[None]:
    """Servers that are there while the block runs."""
    start(*of)
    try:
        yield
    finally:
        close()
