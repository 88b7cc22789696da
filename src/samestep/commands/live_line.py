"""A line at the bottom of the terminal, below the output of a command that writes to the terminal itself."""

from __future__ import annotations

import os
import sys
from types import TracebackType
from typing import TYPE_CHECKING

from rich.text import Text

from samestep.report.console import Terminal

if TYPE_CHECKING:
    from typing_extensions import Self

SAVE, RESTORE, CLEAR = "\x1b7", "\x1b8", "\x1b[2K"
LEAST_ROWS = 4


class LiveLine:
    """The last row of the terminal on stderr, shown while the block runs; nothing where stderr is no terminal.

    rich's own live display would need the command's output to pass through this process. Here the other rows are made
    the terminal's scrolling region, as apt does, and the command keeps the terminal.
    """

    def __init__(self) -> None:
        self._console = Terminal(stderr=True)
        self._rows = 0  # of the terminal, where the region is set

    def __enter__(self) -> Self:
        return self

    def show(self, line: Text) -> None:
        """Replaces the line."""
        if not self._console.is_terminal or self._console.is_dumb_terminal:
            return
        width, rows = self._console.size
        if rows < LEAST_ROWS:
            return
        begin = ""
        if rows != self._rows:  # the first time, or the window has another size
            # A line feed makes room where the cursor is in the last row.
            begin = f"\n{SAVE}\x1b[1;{rows - 1}r{RESTORE}\x1b[1A"
            self._rows = rows
        line.truncate(width - 1, overflow="ellipsis")
        with self._console.capture() as captured:
            self._console.print(line, end="", soft_wrap=True)
        self._write(f"{begin}{SAVE}\x1b[{rows};1H{CLEAR}{captured.get()}{RESTORE}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._rows:
            self._write(f"{SAVE}\x1b[r\x1b[{self._rows};1H{CLEAR}{RESTORE}")

    @staticmethod
    def _write(text: str) -> None:
        sys.stderr.flush()
        os.write(sys.stderr.fileno(), text.encode())  # in one piece, between two of the command's
