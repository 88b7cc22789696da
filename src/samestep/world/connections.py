"""A server at a Unix socket that forks a process for each connection."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable

from samestep.world.orphans import die_with_parent


def fork_for_connections(path: str, answer: Callable[[socket.socket], None]) -> None:
    """Listens at the socket `path`, and calls `answer` with each connection in a process of its own. Never returns."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # processes that have ended leave no zombies
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(f"{path}.new")
    listening.listen(64)
    os.rename(f"{path}.new", path)  # once the path exists, clients can connect
    while True:
        connection, _ = listening.accept()
        if os.fork() == 0:
            die_with_parent()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listening.close()
            answer(connection)
            os._exit(0)
        connection.close()
