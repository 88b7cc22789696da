"""A folder that came from elsewhere: its files have the names of modules, and nobody who stands in it may run them."""

from __future__ import annotations

from pathlib import Path

RAN = "ran.txt"
# What a command, a rank, a launcher and multiprocessing's processes import, early and late.
NAMES = ("json", "multiprocessing", "numpy", "pickle", "pydantic", "random", "sitecustomize", "socket", "torch")


def foreign_folder(parent: Path) -> Path:
    """Makes such a folder in `parent`. Each of its files tells in ran.txt that it has run, and fails."""
    folder = parent / "foreign"
    folder.mkdir(exist_ok=True)
    for name in NAMES:
        tells = f"import sys\nopen({str(folder / RAN)!r}, 'a').write(f'{name} in {{sys.orig_argv}}\\n')\n"
        (folder / f"{name}.py").write_text(f"{tells}raise SystemExit('{name}.py of the current folder has run')\n")
    return folder


def assert_none_ran(folder: Path) -> None:
    assert not (folder / RAN).exists(), (folder / RAN).read_text()
