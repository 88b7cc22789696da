"""Reads the files of a user's script: the lines that the findings of `samestep check` quote, and what they declare."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from samestep.errors import UserError
from samestep.judge.places import Sources
from samestep.judge.source import Source
from samestep.records.script_plan import MEANT, Meant
from samestep.world.regular_files import read_regular

DECLARED = re.compile(r"\s*# samestep: meant (\S+)\s*")  # a line of the script
MOST_BYTES = 1 << 20  # of a file that is read


def read_sources(files: Iterable[str]) -> dict[str, Source]:
    """Returns path -> its source, of those that are regular files of a bounded size."""
    sources = {}
    for file in files:
        with suppress(OSError):
            sources[file] = Source(read_regular(Path(file), MOST_BYTES).decode(errors="replace"))
    return sources


def meant_by(word: str, where: str) -> Meant:
    """Returns what a word declares a training to be. Raises UserError for another word. where: that it was written."""
    if word and word not in MEANT:
        raise UserError(f"{where} {word[:80]!r}: what a training may be meant to be is {' or '.join(MEANT)}")
    return next((meant for meant in MEANT if meant == word), "")


def declared_in(sources: Sources) -> Meant:
    """Returns what a comment of the user's files declares the training to be; '' where none does."""
    lines = (DECLARED.fullmatch(line) for source in sources.values() for line in source.lines)
    return next((meant_by(line[1], "# samestep: meant") for line in lines if line), "")
