"""What a rank's process prints: two files, of which each test's part is cut out."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Printed:
    """A part of what a process printed. label: 'rank 1', or 'threads'."""

    label: str
    out: str = ""
    err: str = ""


class Output:
    """Reads the two files that receive a process's stdout and stderr. paths: none under --pdb, which uses no files.

    live: print them as they grow, and take nothing.
    """

    def __init__(self, label: str, paths: Sequence[Path], live: bool) -> None:
        self.label, self._paths, self._live = label, paths, live
        self._taken, self._shown = [0, 0], [0, 0]

    def take(self, until: tuple[int, int] | None = None) -> Printed:
        """Returns what has been printed since the last call, up to these sizes in bytes of the two files."""
        if not self._paths or self._live:
            return Printed(self.label)
        texts = []
        for number, path in enumerate(self._paths):
            data = _read(path, self._taken[number], until[number] if until else None)
            self._taken[number] += len(data)
            texts.append(data.decode(errors="replace"))
        return Printed(self.label, *texts)

    def show(self, rest: bool = False) -> None:
        """Prints each new line with the rank before it, where pytest captures nothing. rest: a partial line too."""
        if not self._live:
            return
        for number, (path, stream) in enumerate(zip(self._paths, (sys.stdout, sys.stderr))):
            data = _read(path, self._shown[number])
            if not rest:
                data = data[: data.rfind(b"\n") + 1]
            self._shown[number] += len(data)
            for line in data.decode(errors="replace").splitlines():
                print(f"[{self.label}] {line}", file=stream)


def _read(path: Path, begin: int, end: int | None = None) -> bytes:
    if not path.exists():  # the process has not begun
        return b""
    with open(path, "rb") as file:
        file.seek(begin)
        return file.read() if end is None else file.read(max(0, end - begin))
