"""Keeps a command running when nobody reads its output any more, as after `samestep run … | head`."""

from __future__ import annotations

import errno
import os
import sys
from io import TextIOWrapper
from typing import Any, TextIO, cast

GONE = (errno.EPIPE, errno.EIO)  # the reader of a pipe has ended; a terminal has been closed


class Droppable:
    """A text stream that drops everything once writing to it fails.

    any_error: also where its disk is full, for progress messages. Otherwise only where its reader has gone.
    """

    def __init__(self, stream: TextIO, *, any_error: bool) -> None:
        self._stream, self._any_error = stream, any_error

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._drop(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._drop(error)

    def _drop(self, error: OSError) -> None:
        """Sends this and all later output nowhere."""
        if not self._any_error and error.errno not in GONE:
            raise error
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def survive_lost_output() -> None:
    """Keeps this process running where its output cannot be written: results are files, stderr has messages only."""
    sys.stdout = cast(TextIO, Droppable(_opened(sys.stdout), any_error=False))
    sys.stderr = cast(TextIO, Droppable(_opened(sys.stderr), any_error=True))


def _opened(stream: TextIO | None) -> TextIO:
    """Returns the stream; one that goes nowhere for one that the shell has closed (2>&-), which Python has as None.

    A character that the terminal's encoding does not have, or that is none, is printed as its escape.
    """
    if isinstance(stream, TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
    return stream or open(os.devnull, "w")
