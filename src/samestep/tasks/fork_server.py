"""The fork server: a process that has imported torch, and forks a worker for each request.

Importing torch takes seconds, a fork takes milliseconds. The server opens no process group, starts no thread and
never touches CUDA, so that what it forks is as good as new; a worker that must not be forked starts afresh.

It reads requests from its stdin, or from each connection to a socket, a line of JSON each: the worker's arguments, its
environment, its folder and the file for what it prints. It answers with the worker's pid, then with its exit code as
subprocess has it (-9: ended by signal 9). It ends when its requests do, and what it has forked ends with it.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from samestep import engine
from samestep.world.orphans import die_with_parent

PRELOADED = ("torch._dynamo",)  # torch's optimizers import it when the first is made
LOOK_S = 0.01  # how often a worker's end is looked for

Main = Callable[[list[str]], None]


def serve(of: str, main: Main) -> None:
    """Serves the process that has started this one, through stdin and stdout. of: 'ranks' or 'reference'."""
    die_with_parent()
    answers = os.dup(1)
    os.dup2(2, 1)  # a library may print while it is imported
    _preload(of)
    _answer(answers, {"threads": threads()})
    _serve(0, answers, main)


def listen(of: str, path: str, main: Main) -> None:
    """Serves each process that connects to the Unix socket `path`, from a server of its own. For tests."""
    die_with_parent()
    _preload(of)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # servers that have ended leave no zombies
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(f"{path}.new")
    listening.listen(64)
    os.rename(f"{path}.new", path)  # whoever finds it can connect
    while True:
        connection, _ = listening.accept()
        if os.fork() == 0:
            die_with_parent()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listening.close()
            _answer(connection.fileno(), {"threads": threads()})
            _serve(connection.fileno(), connection.fileno(), main)
            os._exit(0)
        connection.close()


def threads() -> int:
    """How many threads this process has. A fork of one that has more could wait for ever for what another held."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 1


def _preload(of: str) -> None:
    engines = sorted(engine.builtin_names()) if of == "ranks" else []  # the reference knows none
    for name in (*PRELOADED, *(f"samestep.engines.{name}" for name in engines)):
        importlib.import_module(name)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a scheduler sends it to all; workers register what they do then


def _answer(to: int, value: Mapping[str, Any]) -> None:
    os.write(to, f"{json.dumps(value)}\n".encode())


def _serve(requests: int, answers: int, main: Main) -> None:
    """Works on one request after the other, and returns when there are no more."""
    begun = b""
    living: set[int] = set()
    while True:
        readable, _, _ = select.select([requests], [], [], LOOK_S if living else None)
        for pid in list(living):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                living.remove(pid)
                _answer(answers, {"ended": pid, "code": os.waitstatus_to_exitcode(status)})
        if not readable:
            continue
        read = os.read(requests, 1 << 16)
        if not read:
            return
        *lines, begun = (begun + read).split(b"\n")
        for line in lines:
            request = json.loads(line)
            pid = os.fork()
            if pid == 0:
                for pipe in {requests, answers} - {0}:
                    os.close(pipe)
                _be_a_worker(request, main)
            living.add(pid)
            _answer(answers, {"forked": pid})


def _be_a_worker(request: Mapping[str, Any], main: Main) -> None:
    """Becomes `python -m samestep.worker ARGUMENTS`, as if it had just started. Never returns."""
    code = 1
    try:
        output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        os.environ.clear()
        os.environ |= request["environment"]
        os.chdir(request["folder"])
        sys.argv = ["samestep.worker", *request["arguments"]]
        import numpy

        random.seed()
        numpy.random.seed()  # else every worker would draw the same
        main(request["arguments"])
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
