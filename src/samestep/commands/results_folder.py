"""Prepares the folder of a command's results: creates it, checks that it is writable, recognises results."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from datetime import datetime
from pathlib import Path
from typing import IO, Literal

from samestep.commands.command_options import LaunchOptions
from samestep.commands.inspected_setup import InspectedSetup
from samestep.commands.machines import is_first
from samestep.commands.options import arguments
from samestep.errors import TrainingFailed, UserError, printable_message, say
from samestep.launch.outer_launcher import LaunchedRank
from samestep.message import Message, as_said, message
from samestep.records.checkpoint import FOLDER, steps_in
from samestep.records.files import read, replace_by, why_not_writable, write
from samestep.records.launch_files import OF_RANKS
from samestep.records.monitor import CSV, PAGE, SUMMARY
from samestep.records.plan import TRACES, RunTask
from samestep.records.record import PROGRESS
from samestep.records.redaction import redacted, redacted_values
from samestep.records.results import RESULTS, read_results
from samestep.records.run_results import RunResults
from samestep.records.runs import COMMAND, STUDY, CommandRecord, ResultsIdentity
from samestep.records.spot_check import CHECKS
from samestep.records.spot_check import FOLDER as SPOT_CHECK_FOLDER
from samestep.report.language import with_english
from samestep.version import __version__
from samestep.world.regular_files import (
    check_place,
    make_folder,
    make_named_folder,
    open_kept,
    remove_empty_folder,
    remove_file,
)

LOCK = ".lock"
# The fields of a ResultsIdentity that may differ when `run` continues a training: a checkpoint fits every engine and
# every number of ranks.
FREE = (
    *("engines", "engine_settings", "launchers", "device", "nproc", "nnodes", "threads", "mesh"),
    *("samestep", "torch", "package"),
)
# The fields of a Setup that are not copied into the ResultsIdentity:
NOT_COPIED = {
    *("out", "deadline_s", "stall_s"),  # fields that decide no result: where it is written, and when a launch is ended
    # Of these fields the values of the inspected setup are recorded.
    *("nproc", "steps", "resume", "also", "machines", "mesh"),
    "proves",  # fields that the name of the command tells
}
WEIGHTS = "weights.safetensors"
# What commands write into the folder, besides what their ranks do (records/launch_files.py). It is looked at before
# hours of training, which could not be kept with a folder in the place of the weights.
FILES = (
    *(LOCK, STUDY, COMMAND, RESULTS, PROGRESS, "plan.json", "collectives-plan.json", "report.html"),
    *(WEIGHTS, CHECKS, CSV, SUMMARY, PAGE, "steps.csv", "evaluations.csv"),
)
FOLDERS = (
    *(FOLDER, SPOT_CHECK_FOLDER, TRACES, "tensorboard", "wandb", "sockets", "torchrun"),
    *("launches", "reference"),  # of `verify` and `compare`
)
BEFORE_A_LAUNCH = {LOCK, STUDY, COMMAND}  # what the folder holds before anything is started
# The files that other ranks and machines may write before this command.
OWN_FILES = re.compile(r"\.lock|slurm\.sh|slurm-.+\.out|rank-\d+|machine-.+|first-machine\.json")


def results_folder(
    command: str,
    inspected: InspectedSetup,
    rank: LaunchedRank | None = None,
    training: str = "",
    *,
    dry_run: bool = False,
) -> Path:
    """Creates or resumes the folder of a command's results, and locks it for the one command that writes the results.

    rank: of this command, where an outer launcher has started it. training: the options of a training or an evaluation,
    in words. dry_run: write nothing.
    """
    setup, out, proof = inspected.setup, inspected.setup.out, inspected.job.proof
    if inspected.machines.min_nodes and command != "run":
        raise UserError(
            f"--nnodes {setup.machines.nnodes}: `run` alone lets machines leave and join; give {command} a number"
        )
    if inspected.machines.nnodes > 1 and not inspected.machines.single_launch and command != "run":
        out = shared_folder(out)
    record = ResultsIdentity(
        command=command,
        file=inspected.job.source,
        samestep=__version__,
        torch=inspected.inspection.machine.torch,
        package=package_digest(),
        nproc=inspected.nproc,
        nnodes=inspected.machines.nnodes,
        steps=proof.steps,
        threads=setup.machines.planned_threads,
        training=training,
        resume=str(setup.resume) if setup.resume else "",
        also=proof.second.ranks if proof.second else 0,
        mesh=str(setup.mesh or ""),
        **{field.name: getattr(setup, field.name) for field in fields(setup) if field.name not in NOT_COPIED},
    )
    record = replace(
        record,
        settings=redacted_values(record.settings),
        engine_settings=redacted_values(record.engine_settings),
    )
    return prepare_on_each(out, record, inspected, rank, free=FREE if command == "run" else (), dry_run=dry_run)


def prepare_on_each(
    out: Path | None,
    record: ResultsIdentity,
    inspected: InspectedSetup,
    rank: LaunchedRank | None,
    *,
    free: Sequence[str] = (),
    dry_run: bool = False,
) -> Path:
    """Prepares the folder that all commands of a launch find: this one, those of other machines, of other ranks."""
    name = f"{rank.launcher}-{rank.id}" if rank else ""
    writes = rank.rank == 0 if rank else is_first(inspected.machines)
    return prepare(out, record, name, writes=writes, free=free, dry_run=dry_run)


def launch_folder(out: Path, inspected: InspectedSetup, rank: LaunchedRank | None, *, dry_run: bool = False) -> Path:
    """Returns the folder of this machine's ranks: `out`, or a subfolder per machine or rank: `out` may be shared."""
    if rank:
        folder = out / f"rank-{rank.rank}"
    elif inspected.machines.nnodes > 1 and not inspected.machines.single_launch:
        folder = out / f"machine-{socket.gethostname()}"
    else:
        return out
    check_place(folder, of_a_folder=True)
    return folder if dry_run else make_folder(folder)


def remove_stale(folder: Path) -> None:
    """Removes what the ranks of an earlier launch, which failed, have left in a folder of ranks."""
    for stale in [path for path in folder.iterdir() if OF_RANKS.fullmatch(path.name)]:
        remove_file(stale)


def shared_folder(out: Path | None) -> Path:
    """Returns the folder that several machines share. Raises UserError where --out is missing."""
    if out is None:
        raise UserError("several machines need a shared folder for the results; name it with --out")
    return out.resolve()


def prepare(
    out: Path | None,
    identity: ResultsIdentity,
    name: str = "",
    *,
    writes: bool = True,
    free: Sequence[str] = (),
    dry_run: bool = False,
) -> Path:
    """Creates the folder for the results: `out`, or a dated one under runs/. A resumed one must have this identity.

    name: replaces the date where several processes must find the same folder. writes: whether this command writes the
    results; only one may. free: the fields of the identity that may differ. dry_run: write nothing.

    Raises UserError when the folder is not writable, or holds the results of another command or of another samestep.
    """
    if out and out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; give a folder for the results with --out")
    folder = out or (Path("runs") / f"{_stem(identity.job)}-{name}" if name else dated_folder(identity.job))
    if dry_run and not folder.exists():
        return folder.resolve()
    absent = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        make_named_folder(folder)
        reason = why_not_writable(folder)
    except OSError as error:
        reason = error.strerror
    if reason:
        raise UserError(f"the folder {folder} is not writable ({reason}); give another with --out")
    for name in FILES:
        check_place(folder / name)
    for name in FOLDERS:
        check_place(folder / name, of_a_folder=True)
    if not writes:
        return folder.resolve()
    _created.extend(path.absolute() for path in absent)
    path = folder / STUDY
    if path.exists():
        existing = read(ResultsIdentity, path)
        differs = [name for name in identity.differences(existing) if name not in free]
        if differs:
            before, now = (_shown(getattr(record, differs[0])) for record in (existing, identity))
            raise UserError(
                f"{folder} holds other results: {differs[0]} was {before} there and is {now} now; "
                f"give another folder with --out{_and_continue(folder, identity.command)}"
            )
    elif any(not OWN_FILES.fullmatch(entry.name) for entry in folder.iterdir()):
        raise UserError(f"the folder {folder} holds files that are not samestep's; give an empty or new one with --out")
    if not dry_run:
        _lock(folder)
        write(path, identity)
    return folder.resolve()


def _and_continue(folder: Path, command: str) -> str:
    """Returns how `run` trains on from the checkpoints of a folder, as with more epochs; '' where there is none."""
    return f", and --resume {folder} to continue its training" if command == "run" and steps_in(folder / FOLDER) else ""


def _shown(value: object) -> str:
    """Returns a value of a ResultsIdentity for an error: a mapping or a tuple as it was typed."""
    if isinstance(value, Mapping):
        value = [f"{name}={text}" for name, text in value.items()]
    return repr(",".join(value) if isinstance(value, list | tuple) else value)


def _stem(job: str) -> str:
    return re.sub(r"[^\w.-]+", "-", Path(job.partition(":")[0]).stem)


def dated_folder(job: str) -> Path:
    """Returns the name of a new folder under runs/."""
    return Path("runs") / f"{datetime.now():%Y-%m-%d-%H%M%S}-{_stem(job)}-{os.getpid()}"


def write_into(folder: Path, name: str, text: str) -> Path:
    """Writes a file for this user alone into the folder of future results: it holds settings as they were given. Raises
    UserError when that is not possible."""
    try:
        replace_by(make_named_folder(folder) / name, lambda file: file.write(text.encode()), mode=0o600)
    except OSError as error:
        raise UserError(
            f"{folder / name} cannot be written ({error.strerror}); give another folder with --out"
        ) from None
    return folder / name


def _lock(folder: Path) -> None:
    """Locks `folder` until release_folders, or the end of this process. Raises UserError when it is locked already."""
    try:
        lock = open_kept(folder / LOCK)
    except OSError as error:
        raise UserError(f"{folder / LOCK} is no lock ({error.strerror}); give another folder with --out") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise UserError(f"another samestep is writing to {folder}; wait for it, or give another --out") from None
    _held.append(lock)


_held: list[IO[bytes]] = []
_created: list[Path] = []  # folders, the deepest first


def release_folders() -> None:
    """Unlocks the folders that this process has locked."""
    _created.clear()
    while _held:
        _held.pop().close()


def remove_unused_folders() -> None:
    """Removes the folders that this process has created, where nothing was started in them: after a refusal."""
    for folder in _created:
        with suppress(OSError):
            if {path.name for path in folder.iterdir()} <= BEFORE_A_LAUNCH:
                for name in BEFORE_A_LAUNCH:
                    remove_file(folder / name)
                remove_empty_folder(folder)
    _created.clear()


def package_digest() -> str:
    """Returns a digest of samestep's source files, so that changed code does not resume an older comparison."""
    import hashlib

    state = hashlib.blake2b(digest_size=8)
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        state.update(path.read_bytes())
    return state.hexdigest()


def words_of(command: str, options: LaunchOptions, job: str = "") -> tuple[str, ...]:
    """Returns a command line with these options, whether they were given there or in Python; without --out.

    job: as workers load it; '': the command has none.
    """
    words = arguments(options, type(options), without=["out"])  # `samestep runs` adds it where the folder is the same
    return ("samestep", command, *([job] if job else []), *words)


@contextmanager
def recorded(folder: Path, words: tuple[str, ...], *, writes: bool = True) -> Iterator[None]:
    """Keeps command.json in `folder` while the block runs, and how it ends. writes: whether this command does."""
    record = CommandRecord(tuple(redacted(words)), os.getcwd(), time.time())

    def keep(outcome: Literal["finished", "failed", "interrupted"] | None, reason: Message | None = None) -> None:
        reason = reason and printable_message(with_english(reason))
        if writes:
            with suppress(OSError):  # a note: no disk that is full may end a command for it
                write(folder / COMMAND, replace(record, outcome=outcome, reason=reason))

    keep(None)
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        keep("interrupted")
        raise
    except (UserError, TrainingFailed) as error:
        keep("failed", error.message)
        raise
    except BaseException as error:
        keep("failed", as_said(f"{type(error).__name__}: {error}"))
        raise
    keep("finished")


def finished_results(out: Path, training: RunTask, words: tuple[str, ...]) -> RunResults | None:
    """Returns the results of the training in `out`, of the same request, where it has ended: nothing is left to do.

    words: the command line, which may name a checkpoint. Raises UserError where the folder holds what `training` would
    replace, and is not to continue.
    """
    weights, checkpoints = out / WEIGHTS, out / FOLDER
    before = read_results(RunResults, out) if (out / RESULTS).exists() else None
    exported = before is not None and before.export == training.export
    if training.export and not exported and _is_place_of_results(Path(training.export), out):
        raise UserError(message("export_is_place_of_results", export=training.export, folder=out))
    if training.export and not exported and _is_filled(Path(training.export)):
        raise UserError(f"{training.export} exists, and would be replaced; give another folder with --export")
    ended = before is not None and before.stopped != "requested" and weights.exists()
    if before is not None and ended and _is_same_line(out, training, words) and (exported or not training.export):
        say(already_finished(out, before))
        return before
    if weights.exists() and (ended or training.resume == "never"):
        raise UserError(f"{weights} exists, and a new training would replace it; give another folder with --out")
    if training.resume == "never" and checkpoints.exists():
        raise UserError(f"{checkpoints} holds another training's checkpoints; give another folder with --out")
    return None


def already_finished(out: Path, results: RunResults) -> Message:
    """Returns the note about a training that has nothing left to do."""
    early = results.stopped == "early"
    return message(
        "training_has_finished_before",
        folder=out,
        steps=results.steps,
        engine=results.engine,
        ranks=results.world_size,
        why=message("stopped_without_improvement") if early else None,
    )


def _is_same_line(out: Path, training: RunTask, words: tuple[str, ...]) -> bool:
    """Returns whether the command is the one that has begun the training, as far as --resume says."""
    if training.resume in ("auto", "never"):
        return training.resume == "auto"
    try:
        return read(CommandRecord, out / COMMAND).words[1:] == words[1:]
    except (OSError, UserError):
        return False


def _is_place_of_results(folder: Path, out: Path) -> bool:
    """Returns whether a training in `out` writes into `folder`, or in its place: an export could not have the name
    then."""
    folder, out = folder.resolve(), out.resolve()
    if out.is_relative_to(folder):
        return True
    if not folder.is_relative_to(out):
        return False
    first = folder.relative_to(out).parts[0]
    return first in (*FILES, *FOLDERS) or OWN_FILES.fullmatch(first) is not None


def _is_filled(path: Path) -> bool:
    return path.exists() and (not path.is_dir() or any(path.iterdir()))
