"""The folder of a command's results: made, checked before anything starts, and recognised when resumed."""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from samestep.errors import UserError
from samestep.records.record import write_json

IDENTITY = "study.json"
LOCK = ".lock"
OURS = re.compile(
    r"\.lock|slurm\.sh|slurm-.+\.out|rank-\d+|machine-.+|first-machine\.json"
)  # what other ranks and machines may leave first


def prepare(out: Path | None, job: str, identity: Mapping[str, Any], name: str = "", *, writes: bool = True) -> Path:
    """The folder to write in: `out`, or a dated one under runs/. `identity` is what a resumed study must share.

    name: used in place of the date, where several processes must find the same folder. writes: whether this command
    leaves the results there; only one may.

    Raises UserError when it cannot be written to, or holds the results of another question.
    """
    folder = out or (Path("runs") / f"{_stem(job)}-{name}" if name else dated(job))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"the folder {folder} is not writable ({error.strerror}); give another with --out") from None
    if not writes:
        return folder.resolve()
    mine, path = json.loads(json.dumps(identity)), folder / IDENTITY
    if path.exists():
        try:
            theirs = dict(json.loads(path.read_text()))
        except ValueError:
            raise UserError(f"{path} cannot be read; give another folder with --out") from None
        differs = [key for key in mine if theirs.get(key) != mine[key]]
        if differs:
            key = differs[0]
            raise UserError(
                f"{folder} holds other results: {key} was {theirs.get(key)!r} there and is {mine[key]!r} now; "
                "give another folder with --out"
            )
    elif any(not OURS.fullmatch(entry.name) for entry in folder.iterdir()):
        raise UserError(f"the folder {folder} holds files that are not samestep's; give an empty or new one with --out")
    _lock(folder)
    write_json(path, mine)
    return folder.resolve()


def _stem(job: str) -> str:
    return re.sub(r"[^\w.-]+", "-", Path(job.partition(":")[0]).stem)


def dated(job: str) -> Path:
    """A new folder's name under runs/."""
    return Path("runs") / f"{datetime.now():%Y-%m-%d-%H%M%S}-{_stem(job)}-{os.getpid()}"


def beside(folder: Path, name: str, text: str) -> Path:
    """Writes a file of ours into a folder of results to come. Raises UserError when it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    except OSError as error:
        raise UserError(
            f"{folder / name} cannot be written ({error.strerror}); give another folder with --out"
        ) from None
    return folder / name


def _lock(folder: Path) -> None:
    """Holds `folder` until this process ends, however it ends. Raises UserError when another holds it."""
    lock = open(folder / LOCK, "w")  # noqa: SIM115 - held open as long as the process lives
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"another samestep is writing to {folder}; wait for it, or give another --out") from None
    _held.append(lock)


_held: list[IO[str]] = []


def package_digest() -> str:
    """A digest of samestep's own files: what one state of them measured is not resumed by another."""
    import hashlib

    state = hashlib.blake2b(digest_size=8)
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        state.update(path.read_bytes())
    return state.hexdigest()
