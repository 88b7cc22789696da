"""Sends what a rank prints to its log. A log that cannot be written loses lines, and never ends the training."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep.world.regular_files import end_of

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class _Log(io.FileIO):
    """A file that drops what its disk does not take. print() would raise an error, and end the job that calls it."""

    def write(self, data: ReadableBuffer) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def log_to(path: Path) -> None:
    """Sends the standard output and error of this process, those of C libraries too, to the end of a file.

    Each write goes to the end that the file then has, so that the command may cut it (samestep.launch.rank_logs).
    """
    log = end_of(path)
    for number in (1, 2):
        os.dup2(log, number)
    os.close(log)
    sys.stdout, sys.stderr = (_text(number) for number in (1, 2))


def log_thread_to(path: Path) -> None:
    """Sends what Python prints from now on to the end of a file; what C libraries print goes where it went."""
    log = end_of(path)
    sys.stdout, sys.stderr = (_text(log) for _ in range(2))


def _text(number: int) -> io.TextIOWrapper:
    raw: Any = _Log(number, "w", closefd=False)
    # Unbuffered, as PYTHONUNBUFFERED asks: the terminal shows a line when it is printed.
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)
