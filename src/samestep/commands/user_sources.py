"""Reads the files of a user's script, whose lines the findings of `samestep check` quote."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from samestep.judge.source import Source
from samestep.world.regular_files import read_regular

MOST_BYTES = 1 << 20  # of a file that is read


def read_sources(files: Iterable[str]) -> dict[str, Source]:
    """Returns path -> its source, of those that are regular files of a bounded size."""
    sources = {}
    for file in files:
        with suppress(OSError):
            sources[file] = Source(read_regular(Path(file), MOST_BYTES).decode(errors="replace"))
    return sources
