"""Keeps the ranks' logs small: a job that prints without end must not fill the disk.

The parent copies a log that has grown too long to rankR.log.1, and cuts the log to nothing. It renames nothing, because
a rank writes to file descriptors that Python, C libraries and the rank's own children share, and that cannot be opened
anew from outside. They are open with O_APPEND: each write goes to the end that the file has at that moment, and so to
its beginning after the cut; without O_APPEND it would leave a hole of the old length. What a rank prints between the
copy's last read and the cut, some microseconds, is lost.
"""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

from samestep.world.regular_files import open_new

LIMIT = 10_000_000  # bytes of one log; together with the copy a rank has at most about twice as many
EVERY_S = 1.0


class LogRotation:
    """Watches the logs of the ranks in `folder`."""

    def __init__(self, folder: Path, limit: int = LIMIT) -> None:
        self._folder, self._limit, self._looked_at = folder, limit, time.monotonic()

    def rotate(self) -> None:
        """Cuts the logs that are too long; looks once a second. A full disk loses the copy, not the training."""
        if time.monotonic() - self._looked_at < EVERY_S:
            return
        self._looked_at = time.monotonic()
        for log in self._folder.glob("rank*.log"):
            with suppress(OSError):
                if log.stat().st_size > self._limit:
                    cut(log)


def cuts_of(log: Path) -> object:
    """Returns what changes when a log is cut: its length alone would not show it, where it has grown again."""
    try:
        copy = log.with_name(f"{log.name}.1").stat()
    except OSError:
        return None
    return copy.st_ino, copy.st_mtime_ns


def cut(log: Path) -> None:
    """Moves what a log holds to a second file of its name and '.1', and leaves it empty."""
    part = log.with_name(f".{log.name}.part")
    try:
        with open(log, "rb") as old, open_new(part) as new:
            shutil.copyfileobj(old, new)
        os.replace(part, log.with_name(f"{log.name}.1"))
    except OSError:  # the disk is full: the log has filled it
        with suppress(OSError):
            part.unlink()
    finally:
        os.truncate(log, 0)
