"""Forks the commands of tests from a process that has imported them: a third of a second each, hundreds of times.

    python tests/command_server.py SOCKET

A client sends a command's arguments, environment and folder, with its two outputs; it receives the pid of the process
that runs it, and at the end its exit code. All forked commands have one hash seed for strings, their workers others.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pkgutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from samestep import __main__ as command
from samestep import commands, launch, proof, records, report
from samestep.world.connections import connect, fork_for_connections
from samestep.world.imports import without_collections
from samestep.world.processes import die_with_parent

NAME = "commands"  # of the socket, in the folder of the fork servers
ROOMS = (commands, launch, proof, records, report)  # what commands import
LINE = 1 << 20  # bytes, of a request


def run(
    arguments: Sequence[str], server: Path, env: Mapping[str, str], cwd: Path, timeout: float
) -> subprocess.CompletedProcess[str]:
    """Has a server run `samestep ARGUMENTS` to its end, as subprocess.run does. Raises subprocess.TimeoutExpired."""
    request = {"arguments": list(arguments), "environment": dict(env), "folder": str(cwd)}
    with (
        connect(server) as connection,
        tempfile.TemporaryFile("w+") as stdout,
        tempfile.TemporaryFile("w+") as stderr,
    ):
        socket.send_fds(connection, [f"{json.dumps(request)}\n".encode()], [stdout.fileno(), stderr.fileno()])
        answers = connection.makefile()
        pid = int(answers.readline())
        try:
            connection.settimeout(timeout)
            code = answers.readline()
        except BaseException as error:  # also of a test that is ended
            os.kill(pid, signal.SIGKILL)
            if isinstance(error, TimeoutError):
                raise subprocess.TimeoutExpired(["samestep", *arguments], timeout) from None
            raise
        stdout.seek(0)
        stderr.seek(0)
        return subprocess.CompletedProcess(["samestep", *arguments], int(code), stdout.read(), stderr.read())


def serve(path: str) -> None:
    """Listens at a socket, and forks a process for each connection, which forks the command and waits for it."""
    die_with_parent()
    with without_collections():
        for room in ROOMS:
            for module in pkgutil.walk_packages(room.__path__, f"{room.__name__}."):
                importlib.import_module(module.name)
        gc.freeze()
    fork_for_connections(Path(path), _answer)


def _answer(connection: socket.socket) -> None:
    line, outputs, _, _ = socket.recv_fds(connection, LINE, 2)
    while not line.endswith(b"\n"):
        more = connection.recv(LINE)
        if not more:  # the client has gone
            return
        line += more
    pid = os.fork()
    if pid == 0:
        connection.close()
        die_with_parent()
        _run(**json.loads(line), outputs=outputs)
    connection.sendall(f"{pid}\n".encode())
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    connection.sendall(f"{code}\n".encode())


def _run(arguments: list[str], environment: dict[str, str], folder: str, outputs: list[int]) -> None:
    """The process of a command, which ends as an interpreter does. Never returns."""
    for number, output in enumerate((os.open(os.devnull, os.O_RDONLY), *outputs)):
        os.dup2(output, number)
    os.environ.clear()
    os.environ |= environment
    os.chdir(folder)
    del sys.path[0]  # as __main__ does, where python -m has put the current folder
    sys.argv = [str(command.__file__), *arguments]
    sys.modules["__main__"] = command  # its help says how it was started
    command.main()
    sys.exit(0)


if __name__ == "__main__":
    serve(sys.argv[1])
