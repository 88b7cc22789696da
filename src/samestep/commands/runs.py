"""runs: lists past runs, how each ended, and the line that continues or repeats it."""

from __future__ import annotations

import fcntl
import os
import shlex
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from samestep.commands.options import why_no_path
from samestep.commands.results_folder import LOCK, WEIGHTS
from samestep.errors import UserError, printable
from samestep.message import Message, as_said, message
from samestep.records.checkpoint import FOLDER, MANIFEST, steps_in
from samestep.records.collectives import CollectiveResults
from samestep.records.files import read
from samestep.records.findings import CheckResults
from samestep.records.record import PROGRESS, Progress, Record
from samestep.records.results import RESULTS, CompareResults, Results
from samestep.records.run_results import EvaluateResults, RunResults
from samestep.records.runs import COMMAND, STUDY, CommandRecord, Outcome, PastRun, ResultsIdentity
from samestep.world.regular_files import open_regular

AnyResults = Results | CheckResults
RESULTS_OF: dict[str, type[AnyResults]] = {
    "verify": CompareResults,
    "compare": CompareResults,
    "run": RunResults,
    "evaluate": EvaluateResults,
    "collectives": CollectiveResults,
    "check": CheckResults,
}
MOST_BYTES = 1 << 26  # of a file that is listed: a folder may be anybody's
T = TypeVar("T")


def runs(folder: str | Path = "runs") -> list[PastRun]:
    """Returns the runs whose results are in the folders of `folder`, the oldest first; or in `folder` itself.

    Raises UserError where there is no such folder.
    """
    if not isinstance(folder, str | Path):
        raise UserError(f"folder={folder!r}: give the path of a folder")
    if why := why_no_path(folder):
        raise UserError(f"folder={str(folder)[:80]!r}: {why}")
    root = Path(folder)
    if not root.is_dir():
        raise UserError(f"there is no folder {root}; name the one that holds the results, as in samestep runs FOLDER")
    folders = [root] if (root / STUDY).exists() else [path.parent for path in root.glob(f"*/{STUDY}")]
    return sorted(map(past_run, folders), key=lambda run: (run.started_at or 0.0, run.folder))


def past_run(folder: Path) -> PastRun:
    """Reads the files in a folder of results. Damaged ones, and those of another samestep, count as absent."""
    began, written_at = _read(CommandRecord, folder / COMMAND), None
    try:
        written_at = (folder / STUDY).stat().st_mtime
        identity = read(ResultsIdentity, folder / STUDY, MOST_BYTES)
    except (UserError, OSError) as error:
        why = error.message if isinstance(error, UserError) else as_said(str(error))
        line = _line(folder, began, same_folder=False)
        return PastRun(
            str(folder),
            "?",
            "?",
            engines=(),
            ranks=None,
            outcome="unknown",
            reason=why,
            started_at=written_at,
            line=line,
        )
    command, results = identity.command, _results(identity, folder)
    trained = results if isinstance(results, RunResults) else None
    progress = next(filter(None, (_read(Progress, path) for path in _everywhere(folder, PROGRESS))), None)
    outcome, reason = _outcome(folder, began, results)
    steps, asked_steps = (trained.steps, trained.asked_steps) if trained else (None, None)
    if steps is None and progress and command == "run":
        steps, asked_steps = progress.done, progress.steps or None
    evaluation = results.evaluation if isinstance(results, RunResults | EvaluateResults) else None
    if evaluation is None and progress and progress.curve:
        evaluation = {name: value for name, value in progress.curve[-1].items() if name != "step"}
    checkpoint = newest_checkpoint(folder)
    proves = command in ("verify", "compare")
    unfinished = outcome in ("failed", "interrupted", "killed", "stopped")
    continues = unfinished and (proves or checkpoint is not None)
    again = unfinished and outcome != "stopped" and not (folder / WEIGHTS).exists()  # the same folder may be used
    return PastRun(
        folder=str(folder),
        command=command,
        job=identity.job,
        engines=identity.engines or (("all",) if proves else ()),
        ranks=identity.nproc * identity.nnodes,
        outcome=outcome,
        reason=reason or _verdicts(results),
        started_at=began.started_at if began else written_at,
        steps=steps,
        asked_steps=asked_steps,
        evaluation=evaluation,
        checkpoint=str(checkpoint) if checkpoint else None,
        line=_line(folder, began, same_folder=continues or again),
        continues=continues,
    )


def newest_checkpoint(folder: Path) -> Path | None:
    """Returns the newest complete checkpoint, checkpoints/step-N with its manifest; None where there is none."""
    checkpoints = (folder / FOLDER / f"step-{step}" for step in steps_in(folder / FOLDER))
    return next((path for path in checkpoints if (path / MANIFEST).exists()), None)


def _outcome(folder: Path, began: CommandRecord | None, results: AnyResults | None) -> tuple[Outcome, Message | None]:
    if _is_locked(folder):
        return "running", None
    if results and (began is None or began.outcome in (None, "finished")):
        stopped = results.stopped if isinstance(results, RunResults) else None
        if stopped is None:
            return "finished", None
        return "stopped", message("stopped_on_request" if stopped == "requested" else "stopped_without_improvement")
    if began and began.outcome and began.outcome != "finished":
        return began.outcome, began.reason
    for path in _everywhere(folder, "error-rank*.json"):
        with suppress(UserError, OSError):
            if error := Record(path.parent).error():
                return "failed", error.message
    return "killed", None


def _is_locked(folder: Path) -> bool:
    """Returns whether a command on this machine is writing into `folder`."""
    with suppress(OSError), open_regular(folder / LOCK) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _everywhere(folder: Path, name: str) -> list[Path]:
    """Returns the files of a name in a folder of results, and in those that its ranks or machines have in it."""
    return sorted(path for pattern in (name, f"rank-*/{name}", f"machine-*/{name}") for path in folder.glob(pattern))


def _verdicts(results: AnyResults | None) -> Message | None:
    """Returns how many engines had each verdict; None for other results than those of verify and compare."""
    rows = results.engines if isinstance(results, CompareResults) else []
    counts = Counter(row.verdict for row in rows)
    return (
        message("engines_by_verdict", verdicts=[f"{count} {word}" for word, count in counts.items()])
        if counts
        else None
    )


def _line(folder: Path, began: CommandRecord | None, *, same_folder: bool) -> str:
    """Returns the line that repeats a command, for a shell. A folder from elsewhere names no other program."""
    words = began.words if began else ()
    texts = [*words, began.cwd if began else "", str(folder)]
    # Not `monitor`, which runs any program.
    is_samestep = words[:1] == ("samestep",) and RESULTS_OF.keys() >= {*words[1:2]}
    if began is None or not is_samestep or any(printable(text) != text for text in texts):
        return ""
    same_cwd = os.path.realpath(began.cwd) == os.path.realpath(os.getcwd())
    out = ["--out", str(folder if same_cwd else folder.resolve())] if same_folder else []
    return ("" if same_cwd else f"cd {shlex.quote(began.cwd)} && ") + shlex.join([*began.words, *out])


def _results(identity: ResultsIdentity, folder: Path) -> AnyResults | None:
    kind = RESULTS_OF.get(identity.command)
    return _read(kind, folder / RESULTS) if kind else None


def _read(kind: type[T], path: Path) -> T | None:
    with suppress(OSError, UserError):
        return read(kind, path, MOST_BYTES)
    return None
