"""Servers at Unix sockets, which fork processes."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable

from samestep.world.orphans import die_with_parent


def listen(path: str) -> socket.socket:
    """Returns a socket that listens at `path`. Processes that this one forks from now on leave no zombies."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(f"{path}.new")
    listening.listen(64)
    os.rename(f"{path}.new", path)  # once the path exists, clients can connect
    return listening


def fork_for_connections(path: str, answer: Callable[[socket.socket], None]) -> None:
    """Listens at the socket `path`, and calls `answer` with each connection in a process of its own. Never returns."""
    listening = listen(path)
    while True:
        connection, _ = listening.accept()
        if os.fork() == 0:
            die_with_parent()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listening.close()
            answer(connection)
            os._exit(0)
        connection.close()
