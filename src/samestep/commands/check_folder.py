"""A copy of the working directory for a replay: what it writes there is not the user's, and what the recording wrote is
not in it."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

COPIED = 1 << 20  # bytes of a file that is copied; a larger one is linked
ENTRIES, ALL = 1000, 20_000  # of a folder that is copied, and of all; a larger folder is linked as a whole
LINKED = {".git", ".hg", ".venv", "venv", "node_modules", "__pycache__", "site-packages"}


def copy_folder(source: Path, target: Path, since: float, without: Path) -> None:
    """Copies a folder's small files and links its large ones.

    Leaves out the folder `without`, and files that have changed since `since`, in seconds of the epoch.
    """
    _copy(source, target, since, without.resolve(), [ALL])


def _copy(source: Path, target: Path, since: float, without: Path, left: list[int]) -> None:
    target.mkdir(parents=True)
    with suppress(OSError), os.scandir(source) as scan:
        entries = list(scan)
        left[0] -= len(entries)
        for entry in entries:
            path = Path(entry.path)
            with suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    if path.resolve() == without:
                        continue
                    if entry.name in LINKED or left[0] < 0 or _entries(path) > ENTRIES:
                        (target / entry.name).symlink_to(path)
                    else:
                        _copy(path, target / entry.name, since, without, left)
                    continue
                facts = entry.stat()
                if max(facts.st_mtime, facts.st_ctime) >= since:
                    continue
                if facts.st_size <= COPIED and entry.is_file():
                    shutil.copy2(path, target / entry.name)
                else:
                    (target / entry.name).symlink_to(path)


def _entries(path: Path) -> int:
    with os.scandir(path) as entries:
        return sum(1 for _ in entries)
