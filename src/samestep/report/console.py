"""The terminal on which commands print: texts from elsewhere are shown on it, and do not act on it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

from samestep.errors import LONGEST_MESSAGE, printable


def cell(text: str, style: str | Style = "") -> Text:
    """Returns a cell of a table: one line, in which rich's markup is text."""
    return Text(printable(text), style=style)


class Terminal(Console):
    """A rich console that prints control characters as escapes; colours and its own movements of the cursor stay."""

    def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yields what rich makes of a renderable. All that is printed, of tables too, comes through here."""
        for segment in super().render(renderable, options):
            text, style, control = segment
            if control is None and not text.isprintable():
                text = printable(text, LONGEST_MESSAGE, lines=True)
            # A link of a style is written into the terminal as it came.
            safe = style.update_link(None) if style is not None and style.link else style
            yield Segment(text, safe, control)

    def show_line(self, text: str, style: str | Style = "") -> None:
        """Prints one line, which the terminal may wrap; rich's markup in it, as [bold], is text."""
        self.print(cell(text, style), soft_wrap=True)


def terminal(width: int) -> Terminal:
    """Returns a console on stdout; of this width where that is no terminal (a file, a log)."""
    console = Terminal()
    return console if console.is_terminal or "COLUMNS" in os.environ else Terminal(width=width)
