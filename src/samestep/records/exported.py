"""The folder of an export: a hidden file in it lists what samestep has written there, which alone it may remove."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from samestep.records.files import replace_text
from samestep.world.regular_files import read_regular

LIST = ".samestep-export"
MOST_BYTES = 1 << 20


def write_list(folder: Path) -> None:
    """Notes that an export has written all files that are in `folder`."""
    replace_text(folder / LIST, "\n".join(sorted(_files(folder))))


def other_file(folder: Path) -> str:
    """Returns the name of a file in `folder` that no export has written; '' where there is none."""
    written = {LIST}
    with suppress(OSError, ValueError):
        written |= {*read_regular(folder / LIST, MOST_BYTES).decode().split("\n")}
    return min(_files(folder) - written, default="")


def _files(folder: Path) -> set[str]:
    """The names of what is in a folder, with those in its folders; an empty folder is no file."""
    return {
        os.path.relpath(os.path.join(inside, name), folder)
        for inside, folders, files in os.walk(folder)
        for name in [
            *files,
            *(link for link in folders if os.path.islink(os.path.join(inside, link))),
        ]
    }
