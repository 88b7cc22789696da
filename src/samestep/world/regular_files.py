"""Opens files that others may have put there: regular ones of bounded size. A named pipe would wait for ever."""

from __future__ import annotations

import errno
import os
import stat
from functools import partial
from pathlib import Path
from typing import IO, Any

KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}
UNBOUNDED = 1 << 62


class NotRegular(OSError):
    """What is opened is no regular file, or is too large. strerror: 'it is a named pipe, not a file'."""

    def __init__(self, why: str, path: Path) -> None:
        super().__init__(errno.EINVAL, why, str(path))


def open_regular(path: Path, most: int = UNBOUNDED) -> IO[bytes]:
    """Opens a file for reading; links are followed. Raises NotRegular for what is no file, or has over `most` bytes."""
    _check_kind(os.stat(path), path, most)  # before it is opened, which alone starts what some devices do
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_kind(os.fstat(descriptor), path, most)  # again, because another process may have replaced it
    except NotRegular:
        os.close(descriptor)
        raise
    return open(descriptor, "rb")


def open_new(path: Path, *, text: bool = False, buffering: int = -1, mode: int = 0o666) -> IO[Any]:
    """Opens a file for writing in the place of what has its name: a link there is removed, and changes no other file.

    text: lines end as they are written. mode: the permissions, less those that the umask takes.
    """
    path.unlink(missing_ok=True)
    opener = partial(os.open, mode=mode)
    # x: nor a link that another process has put there since.
    return open(path, "x" if text else "xb", buffering, newline="" if text else None, opener=opener)


def read_regular(path: Path, most: int = UNBOUNDED) -> bytes:
    """Returns the bytes of a file. Raises NotRegular as open_regular does."""
    with open_regular(path, most) as file:
        return file.read()


def check_regular(path: Path, most: int = UNBOUNDED) -> None:
    """Raises NotRegular as open_regular does: for a file that a library opens by its name."""
    open_regular(path, most).close()


def _check_kind(status: os.stat_result, path: Path, most: int) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise NotRegular(f"it is {kind}, not a file", path)
    if status.st_size > most:
        raise NotRegular(f"it has {status.st_size:,} bytes, more than the {most:,} that such a file may have", path)
