"""Unix sockets for this user's processes alone, and servers that fork a process for each connection.

A socket lies in a folder that no other user may enter, and accepts only peers of this user. Its path may be of any
length. None is abstract: any user could connect to it.
"""

from __future__ import annotations

import os
import signal
import socket
import stat
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from samestep.errors import UserError
from samestep.message import message
from samestep.world.processes import die_with_parent

DESCRIPTORS = "/proc/self/fd"
PEER = struct.Struct("3i")  # what SO_PEERCRED gives: pid, uid, gid


def make_private(folder: Path) -> Path:
    """Creates a folder for this user alone, where there is none. Returns it.

    Raises UserError for a folder that another user made, or may enter: its files could be links to others.
    """
    with suppress(FileExistsError):  # also of what is no folder
        folder.mkdir(mode=0o700)
    check_private(folder)
    return folder


def check_private(folder: Path) -> None:
    """Raises UserError for a folder that is a link, belongs to another user, or is open to others."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise UserError(message("folder_is_not_private", folder=folder))


@contextmanager
def short_path(path: Path) -> Iterator[str]:
    """Yields a short name for a socket's path, which may have 107 characters at most, during the block."""
    if not os.path.isdir(DESCRIPTORS):  # not Linux
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"{DESCRIPTORS}/{folder}/{path.name}"
    finally:
        os.close(folder)


def listen(path: Path) -> socket.socket:
    """Returns a socket that listens at `path`, in a folder of this user alone."""
    check_private(path.parent)
    listening = socket.socket(socket.AF_UNIX)
    new = path.with_name(f"{path.name}.new")
    with short_path(new) as name:
        listening.bind(name)
    listening.listen(64)
    os.rename(new, path)  # once the path exists, clients can connect
    return listening


def accept(listening: socket.socket) -> socket.socket:
    """Waits for a connection of this user's and returns it; closes those of others. Raises TimeoutError."""
    while True:
        connection, _ = listening.accept()
        if _is_own(connection):
            return connection
        connection.close()


def connect(path: Path, timeout_s: float | None = None) -> socket.socket:
    """Connects to the socket at `path`. Raises PermissionError where another user listens there."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(timeout_s)
        with short_path(path) as name:
            connection.connect(name)
        if not _is_own(connection):
            raise PermissionError(f"another user listens at {path}")
    except BaseException:
        connection.close()
        raise
    return connection


def _is_own(connection: socket.socket) -> bool:
    """Whether the process at the other end is this user's. True where the system does not tell: the folder decides."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return True
    _, user, _ = PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, option, PEER.size))
    return bool(user == os.getuid())


def fork_for_connections(path: Path, answer: Callable[[socket.socket], None]) -> None:
    """Listens at the socket `path`, and calls `answer` with each connection in a process of its own. Never returns.

    These processes leave no zombies.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listening = listen(path)
    while True:
        connection = accept(listening)
        if os.fork() == 0:
            die_with_parent()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listening.close()
            answer(connection)
            os._exit(0)
        connection.close()
