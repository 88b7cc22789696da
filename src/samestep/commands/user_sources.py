"""Reads the files of a user's script, whose lines the findings of `samestep check` quote."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from contextlib import suppress

from samestep.proof.script.source import Source

MOST_BYTES = 1 << 20  # of a file that is read


def read_sources(files: Iterable[str]) -> dict[str, Source]:
    """Returns path -> its source, of those that are regular files of a bounded size."""
    sources = {}
    for file in files:
        with suppress(OSError):
            opened = os.open(file, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would wait for its writer
            with open(opened, "rb") as stream:
                facts = os.fstat(opened)
                if stat.S_ISREG(facts.st_mode) and facts.st_size <= MOST_BYTES:
                    sources[file] = Source(stream.read(MOST_BYTES).decode(errors="replace"))
    return sources
