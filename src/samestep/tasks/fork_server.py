"""The fork server: a process that has imported torch and forks a worker for each request.

Importing torch takes seconds, a fork takes milliseconds. The server opens no process group, starts no thread and does
not use CUDA, so a forked worker behaves like a new process. A worker that must not be forked is started normally.

Requests come on stdin, or on a connection to a socket. The server answers each with the worker's pid, and later with
its exit code as in subprocess (-9: killed by signal 9). At the end of its input the server exits, and its workers end
with it.
"""

from __future__ import annotations

import gc
import importlib
import importlib.metadata
import os
import random
import select
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from samestep import engine
from samestep.records.files import prepare
from samestep.records.fork_messages import ForkAnswer, ForkRequest, line_of, request_of
from samestep.records.plan import Plan, ReferencePlan
from samestep.records.record import Progress, RankRecord
from samestep.records.script import ScriptRecord
from samestep.records.script_plan import ScriptPlan
from samestep.world.connections import fork_for_connections
from samestep.world.foreign_code import as_exceptions
from samestep.world.imports import without_collections
from samestep.world.processes import die_with_parent
from samestep.world.regular_files import end_of

PRELOADED = ("torch._dynamo",)  # torch imports it when the first optimizer is created
OF_TESTS = ("samestep.tasks.rank_tests",)  # with pytest
RECORDS = (Plan, ReferencePlan, Progress, RankRecord, ScriptPlan, ScriptRecord)  # what workers read and write
POLL_S = 0.01  # between two checks for workers that have ended

Main = Callable[[list[str]], None]


def serve(kind: str, main: Main) -> None:
    """Serves the parent process through stdin and stdout. kind: 'ranks', 'reference' or 'tests', what it forks."""
    die_with_parent()
    answers = os.dup(1)
    os.dup2(2, 1)  # a library may print while it is imported
    _preload(kind)
    _answer(answers, ForkAnswer(threads=threads(), pid=os.getpid()))
    _serve(0, answers, main)


def listen(kind: str, path: str, preloads: Sequence[str], main: Main) -> None:
    """Listens on the Unix socket `path` and forks a server for each connection: for tests, and for ranks that have
    imported `preloads` besides torch and this package."""
    die_with_parent()
    _preload(kind, preloads)

    def serve_connection(connection: socket.socket) -> None:
        _answer(connection.fileno(), ForkAnswer(threads=threads(), pid=os.getpid()))
        _serve(connection.fileno(), connection.fileno(), main)

    fork_for_connections(Path(path), serve_connection)


def threads() -> int:
    """Returns how many threads this process has. With more than one, a forked worker could deadlock."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 1


def _preload(kind: str, preloads: Sequence[str] = ()) -> None:
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # who has asked CUDA itself cannot fork a user of it
    with without_collections():
        of_tests = OF_TESTS if kind == "tests" else ()
        of_ranks = [
            "samestep.recorder.run_script",
            *(f"samestep.engines.{name}" for name in sorted(engine.builtin_names())),
        ]
        for name in (
            *PRELOADED,
            *of_tests,
            *(of_ranks if kind == "ranks" else ()),
            *preloads,
        ):  # the reference uses no engine
            importlib.import_module(name)
        for plugin in importlib.metadata.entry_points(group="pytest11") if of_tests else ():
            with suppress(Exception), as_exceptions():  # pytest will show it
                plugin.load()
        prepare(*RECORDS)
        # A collection in a worker, as libraries ask for, skips a million objects that are imported already.
        gc.freeze()


def _answer(descriptor: int, answer: ForkAnswer) -> None:
    with suppress(BrokenPipeError):  # the command has ended
        os.write(descriptor, line_of(answer))


def _serve(requests: int, answers: int, main: Main) -> None:
    """Handles requests until the input ends."""
    incomplete = b""  # the beginning of a line
    running: set[int] = set()
    while True:
        readable, _, _ = select.select([requests], [], [], POLL_S if running else None)
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                running.remove(pid)
                _answer(answers, ForkAnswer(pid=pid, code=os.waitstatus_to_exitcode(status)))
        if not readable:
            continue
        try:
            read = os.read(requests, 1 << 16)
        except ConnectionError:  # the command has ended without reading the last answer
            return
        if not read:
            return
        *lines, incomplete = (incomplete + read).split(b"\n")
        for line in lines:
            request = request_of(line)
            pid = os.fork()
            if pid == 0:
                for pipe in {requests, answers} - {0}:
                    os.close(pipe)
                _run_worker(request, main)
            running.add(pid)
            _answer(answers, ForkAnswer(pid=pid))


def _run_worker(request: ForkRequest, main: Main) -> None:
    """Runs `python -m samestep.worker ARGUMENTS` in this forked process, and exits. Never returns."""
    code = 1
    try:
        output = end_of(Path(request.output))
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        os.environ.clear()
        os.environ |= request.environment
        os.chdir(request.folder)
        sys.argv = ["samestep.worker", *request.arguments]
        import numpy

        random.seed()
        numpy.random.seed()  # otherwise every worker would draw the same numbers
        main(request.arguments)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
