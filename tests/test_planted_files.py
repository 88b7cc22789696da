"""A link, a named pipe or a folder in the place of each file that a command writes: what others have stays as it is."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from command import DIGITS, samestep
from lane_marks import in_turn

OUT, WRITTEN, PRECIOUS = "out", "written", "precious"
SMALL = (*DIGITS, "--nproc", "2")
LOOKED_AT = (
    "--set",
    "epochs=1",
    "--spot-check",
    "every=8",
    "--checkpoint-every",
    "8steps",
    "--evaluate-steps",
    "8",
    "--profile",
    "steps=2..3",
)
STEP = """\
import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.randn(8, 4)).sum().backward()
optimizer.step()
"""
# name -> what is typed. Each is given once in a new folder, and then in one that holds its study.json and plants.
COMMANDS: dict[str, tuple[str, ...]] = {
    "monitor": ("monitor", "--out", OUT, "--", sys.executable, "step.py"),
    "run": ("run", *SMALL, *LOOKED_AT, "--log", "csv,tensorboard", "--out", OUT),
    "verify": ("verify", *SMALL, "--quick", "--engines", "ddp", "--launcher", "fork", "--out", OUT),
    "collectives": (
        "collectives",
        "--op",
        "all_reduce",
        "--sizes",
        "0",
        "--launcher",
        "fork",
        "--nproc",
        "2",
        "--out",
        OUT,
    ),
    "eject": ("eject", *DIGITS, "--to", f"{OUT}/train.py"),
}


KINDS = ("link", "pipe", "folder", "link to a folder")
QUICK = [("monitor", "link")]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=() if (name, kind) in QUICK else in_turn(4, row, column))
        for row, name in enumerate(COMMANDS)
        for column, kind in enumerate(KINDS)
        if kind != "link to a folder" or name not in ("collectives", "eject")
    ],
)
def test_what_is_planted_changes_nothing_elsewhere(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In all places at once. Where the command refuses one, it names it; the others are tried without that one."""
    monkeypatch.chdir(tmp_path)
    Path("step.py").write_text(STEP)
    Path(OUT).mkdir()
    clean = samestep(*COMMANDS[name])
    assert clean.returncode == 0, clean.stderr
    shutil.move(OUT, WRITTEN)
    places = _folders() if kind == "link to a folder" else _files()
    assert places
    code = 2
    while code and places:
        _plant(kind, places)
        before = _contents()
        done = samestep(*COMMANDS[name])
        code, said = done.returncode, done.stdout + done.stderr
        # 1: an engine failed for it, and the others are told.
        assert code in (0, 1, 2) and "Traceback" not in said, said
        assert _contents() == before, (places, said)
        named = [place for place in places if f"{OUT}/{place}" in said]
        assert not code or named, (places, said)
        places = [place for place in places if place != max(named, key=len, default="")]


def _files() -> list[str]:
    """Returns the paths of the files that a command has written, but for names that it never gives again, and for what
    tells the command that the folder is its own."""
    paths = [path.relative_to(WRITTEN) for path in Path(WRITTEN).rglob("*") if not path.is_dir()]
    new = ("study.json", "events.out", "monitored-")
    return sorted(str(path) for path in paths if not path.name.startswith(new) and path.parts[0] != "torchrun")


def _folders() -> list[str]:
    return sorted(path.name for path in Path(WRITTEN).iterdir() if path.is_dir())


def _plant(kind: str, places: list[str]) -> None:
    """Makes the folder in which the command writes anew, and what others have in the folder `precious`."""
    for folder in (OUT, PRECIOUS):
        shutil.rmtree(folder, ignore_errors=True)
        Path(folder).mkdir()
    if Path(WRITTEN, "study.json").exists():
        shutil.copy(f"{WRITTEN}/study.json", OUT)
    for number, place in enumerate(places):
        target, precious = Path(OUT, place), Path(PRECIOUS, str(number)).absolute()
        for folder in [*reversed(target.relative_to(OUT).parents)][1:]:
            Path(OUT, folder).mkdir(mode=0o700, exist_ok=True)
        if kind == "pipe":
            os.mkfifo(target)
        elif kind == "folder":
            target.mkdir()
            (target / PRECIOUS).write_text("kept")
        elif kind == "link":
            precious.write_text("kept")
            target.symlink_to(precious)
        else:  # where the command finds the names that it has given itself
            shutil.copytree(Path(WRITTEN, place), precious, ignore=shutil.ignore_patterns("collectives-rank*"))
            target.symlink_to(precious)


def _contents() -> dict[Path, bytes]:
    """Returns what others have: below `precious`, and in each file of that name."""
    paths = [*Path(PRECIOUS).rglob("*"), *Path(OUT).rglob(PRECIOUS)]
    return {path: path.read_bytes() for path in paths if path.is_file()}
