"""Makes a git repository of tests/against/script, and changes its working directory."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import torch

from against.changes import Change
from planting import plant_in_files
from samestep.records.call_site import ChangedLines
from samestep.records.files import from_json
from samestep.records.findings import DiffResults, question_of

SCRIPT = Path(__file__).parent / "script"
IGNORED = "images.pt\nlast.pt\nnewest.pt\nruns/\n__pycache__/\n"


def git(folder: Path, *words: str) -> str:
    settings = ("-c", "user.name=samestep", "-c", "user.email=none", "-c", "init.defaultBranch=main")
    done = subprocess.run(["git", *settings, *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout


def committed(folder: Path) -> Path:
    """Writes the script, and the data that it reads, and commits all but these."""
    folder.mkdir(parents=True)
    for file in SCRIPT.glob("*.py"):
        (folder / file.name).write_text(file.read_text())
    (folder / ".gitignore").write_text(IGNORED)
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.rand(64, 1, 4, 4, generator=generator), torch.randint(4, (64,), generator=generator)
    torch.save((images, labels), folder / "images.pt")
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "as it was")
    return folder


def make_change(changed: Change, folder: Path, script: str = "train.py") -> None:
    """Makes a change in a folder. Raises ValueError where an edit does not apply."""
    plant_in_files(folder, changed.edits, script)
    for old, new in changed.moves:
        (folder / new).parent.mkdir(exist_ok=True)
        (folder / old).rename(folder / new)


def words_of(changed: Change, folder: Path) -> list[str]:
    """Makes a change in a repository of its own; returns what is typed after `samestep` to compare it."""
    make_change(changed, committed(folder))
    options = ["--against", "main", "--nproc", "2", "--launcher", "fork", "--json"]
    return ["check", *options, "train.py", *changed.arguments.split()]


def results_of(output: str) -> DiffResults:
    return from_json(DiffResults, json.loads(output))


def first_change(results: DiffResults) -> ChangedLines | None:
    return results.changes[0] if results.changes else None


def named_by(results: DiffResults) -> str:
    """The question whose answer is the first difference."""
    return question_of(results)
