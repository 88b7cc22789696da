"""Looks whether a training's folder holds one that has finished, or one that it is not to continue."""

from __future__ import annotations

from pathlib import Path

from samestep.errors import UserError, say
from samestep.records.checkpoint import FOLDER
from samestep.records.files import read
from samestep.records.plan import RunTask
from samestep.records.results import RESULTS, RunResults, read_results
from samestep.records.runs import COMMAND, CommandRecord

WEIGHTS = "weights.safetensors"


def finished_results(out: Path, training: RunTask, words: tuple[str, ...]) -> RunResults | None:
    """Returns the results of the training in `out`, of the same request, where it has ended: nothing is left to do.

    words: the command line, which may name a checkpoint. Raises UserError where the folder holds what `training` would
    replace, and is not to continue.
    """
    weights, checkpoints = out / WEIGHTS, out / FOLDER
    before = read_results(RunResults, out) if (out / RESULTS).exists() else None
    exported = before is not None and before.export == training.export
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


def already_finished(out: Path, results: RunResults) -> str:
    """Returns the sentence about a training that has nothing left to do."""
    why = ", its evaluations did not improve" if results.stopped == "early" else ""
    ranks = f"{results.world_size} rank{'s' if results.world_size > 1 else ''}"
    return (
        f"already finished: {out} holds this training's {results.steps} steps, of {results.engine} on {ranks}{why}; to "
        "train again, give another folder with --out"
    )


def _is_same_line(out: Path, training: RunTask, words: tuple[str, ...]) -> bool:
    """Whether the command is the one that has begun the training, as far as --resume says."""
    if training.resume in ("auto", "never"):
        return training.resume == "auto"
    try:
        return read(CommandRecord, out / COMMAND).words[1:] == words[1:]
    except (OSError, UserError):
        return False


def _is_filled(path: Path) -> bool:
    return path.exists() and (not path.is_dir() or any(path.iterdir()))
