"""Copies a working directory for a training that is to leave it as it is.

The copy has small files as they were when the script was started; large files and folders are links.
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from samestep.records.script_plan import ScriptPlan
from samestep.world.regular_files import read_regular

COPIED = 1 << 20  # bytes of a file that is copied; a larger one is linked
# The most entries of a folder that is copied, and of all; a larger folder is linked as a whole.
ENTRIES, ALL = 1000, 20_000
LEVELS = 3  # how many folders above the working directory a script may name
ABOVE = re.compile(r"""["'\s=]((?:\.\./)*\.\.)(?:/([^"'\s]*))?(?=["'\s])""")  # '..', '../..', '../data/train.bin'
ABOVE_FILE = re.compile(r"dirname\(|\.parents?\b")  # of __file__, on the search path
LINKED = {".git", ".hg", ".venv", "venv", "node_modules", "__pycache__", "site-packages"}


def work_folder(plan: ScriptPlan, temporary: Path) -> Path:
    """Returns a copy of the working directory, below a temporary folder."""
    work = Path(temporary, *["root", *["folder"] * LEVELS, *Path.cwd().parts[1:]][-LEVELS - 1 :])
    copy_folder(Path.cwd(), work, plan.started_at, Path(plan.out))
    copy_beside(plan, work)
    return work


def copy_folder(source: Path, target: Path, since: float, without: Path) -> None:
    """Copies a folder's small files and links its large ones.

    Leaves out the folder `without`, and files that have changed since `since`, in seconds of the epoch.
    """
    _copy(source, target, since, without.resolve(), [ALL])


def copy_beside(plan: ScriptPlan, work: Path) -> None:
    """Copies or links what a script names above the working directory, as '../data', to where the copy has it; of '..'
    itself, and of folders that it puts on the search path, the Python modules."""
    text = ""
    with suppress(OSError):
        text = "" if plan.module else read_regular(Path(plan.script), COPIED).decode(errors="replace")
    named = {*ABOVE.findall(f"{text} {' '.join(plan.arguments)} ")}
    if "sys.path" in text and ABOVE_FILE.search(text):
        named |= {("..", ""), ("../..", "")}
    cwd = Path.cwd().resolve()
    # Whole folders first: one of them is not copied where a single file of it already is.
    for above, below in sorted(named, key=lambda part: bool(part[1])):
        levels = above.count("..")
        if levels > min(LEVELS, len(cwd.parents) - 1):
            continue
        source, target = cwd.parents[levels - 1], work.parents[levels - 1]
        if below:
            _copy_path(source / below, target / below, plan.started_at)
            continue
        with suppress(OSError), os.scandir(source) as entries:
            for entry in [entry for entry in entries if _is_module(entry)]:
                _copy_path(source / entry.name, target / entry.name, plan.started_at)


def _is_module(entry: os.DirEntry[str]) -> bool:
    """Returns whether a folder's entry is a Python module, or a folder that holds some."""
    if entry.is_file():
        return entry.name.endswith(".py")
    with suppress(OSError):
        return entry.name.isidentifier() and any(Path(entry.path).glob("*.py"))
    return False


def _copy_path(source: Path, target: Path, since: float) -> None:
    """Copies a small file or folder, and links a large one, unless it is there or was written since `since`."""
    with suppress(OSError):
        if target.exists() or not source.exists() or (source.is_file() and source.stat().st_mtime >= since):
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir() and _entries(source) <= ENTRIES:
            _copy(source, target, since, source / ".", [ALL])
        elif source.is_dir() or source.stat().st_size > COPIED:
            target.symlink_to(source.resolve())
        else:
            shutil.copy2(source, target)


def _copy(source: Path, target: Path, since: float, without: Path, left: list[int]) -> None:
    """Copies a folder's entries. left: how many more entries may be copied, in its one element."""
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
