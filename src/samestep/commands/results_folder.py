"""The folder of a command's results: made, checked before anything starts, and recognised when resumed."""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import IO

from samestep.commands.machines import is_first
from samestep.commands.study import Study
from samestep.errors import UserError
from samestep.launch.started_by import LaunchedRank
from samestep.records.files import SCHEMA, write_json
from samestep.version import __version__

IDENTITY = "study.json"
LOCK = ".lock"
OURS = re.compile(
    r"\.lock|slurm\.sh|slurm-.+\.out|rank-\d+|machine-.+|first-machine\.json"
)  # what other ranks and machines may leave first


def folder_of(command: str, study: Study, inside: LaunchedRank | None = None, weights: str | None = None) -> Path:
    """The folder of a command's results: made, locked by its one writer, and recognised when it is resumed.

    inside: this command is one rank of somebody's launcher. weights: a digest of those that are evaluated.
    """
    setup, out = study.setup, study.setup.out
    if study.machines.nnodes > 1 and not study.machines.single_launch and command != "run":
        out = shared_folder(out)
    name = f"{inside.launcher}-{inside.id}" if inside else ""
    writes = inside.rank == 0 if inside else is_first(study.machines)
    identity: dict[str, object] = {"schema": SCHEMA, "command": command, "file": study.job.source}
    identity |= {"samestep": __version__, "torch": study.inspection.machine.torch, "package": package_digest()}
    kept = ["job", "settings", "engines", "launchers", "engine_settings", "device", "steps", "rounds"]
    kept += ["warmup_steps", "measured_steps"]
    identity |= {name: getattr(setup, name) for name in kept}
    identity |= {"nproc": study.nproc, "nnodes": study.machines.nnodes}
    if weights:
        identity["weights"] = weights
    return prepare(out, setup.job, identity, name, writes=writes)


def launch_folder(out: Path, study: Study, inside: LaunchedRank | None) -> Path:
    """Where the launch of this machine writes: `out`, or a folder of its own in it, since `out` may be shared."""
    if inside:
        own = out / f"rank-{inside.rank}"
    elif study.machines.nnodes > 1 and not study.machines.single_launch:
        own = out / f"machine-{socket.gethostname()}"
    else:
        return out
    own.mkdir(exist_ok=True)
    return own


def shared_folder(out: Path | None) -> Path:
    """The folder that several machines share. Raises UserError when none is named."""
    if out is None:
        raise UserError("several machines prove together in one folder that they share; name it with --out")
    return out.resolve()


def prepare(out: Path | None, job: str, identity: Mapping[str, object], name: str = "", *, writes: bool = True) -> Path:
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
