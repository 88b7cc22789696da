"""Plays a recorded script again in one process, in a copy of the working directory.

What the replay writes there is not the user's, and what the recording wrote is not in it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from samestep.errors import TrainingFailed, UserError
from samestep.message import Message, message
from samestep.proof.script import pipeline_stages
from samestep.proof.script.replay import judge_replay, not_replayed
from samestep.records.files import read, write
from samestep.records.record import Record
from samestep.records.script import (
    KEPT,
    PLAN,
    REPLAY_FOLDER,
    REPLAYED,
    Finding,
    ReplayPlan,
    ReplayRecord,
    ScriptPlan,
    ScriptRecord,
)

Run = Callable[[Path], Record]  # runs the plan in a folder, in one process
COPIED = 1 << 20  # bytes of a file that is copied; a larger one is linked
ENTRIES, ALL = 1000, 20_000  # of a folder that is copied, and of all; a larger folder is linked as a whole
LINKED = {".git", ".hg", ".venv", "venv", "node_modules", "__pycache__", "site-packages"}


def replay(plan: ScriptPlan, ranks: Sequence[ScriptRecord], record: Record, run: Run) -> list[Finding]:
    """Plays a script's record in one process; answers whether it has taken the same steps.

    Raises UserError where the launch is a mistake of the user's.
    """
    folder = Path(plan.out)
    if why := _why_not(ranks, folder):
        return [not_replayed(why)]
    with tempfile.TemporaryDirectory(prefix="samestep-replay-") as temporary:
        work = Path(temporary) / "work"
        copy_folder(Path.cwd(), work, plan.started_at, folder)
        try:
            result = _play(plan, ranks, work, run, in_turn=False)
            if result.needs_turns:
                result = _play(plan, ranks, work, run, in_turn=True)
        except (TrainingFailed, UserError) as error:
            return [not_replayed(message("script_fails_in_one_process", error=error.message))]
    replayed = folder / REPLAY_FOLDER
    return judge_replay(result, ranks, read(ScriptRecord, replayed / "rank0.json"), record, Record(replayed))


def _why_not(ranks: Sequence[ScriptRecord], folder: Path) -> Message | None:
    """Returns why a record is not to be replayed; None where it is."""
    if not min(len(rank.steps) for rank in ranks):
        return message("no_step_to_replay")
    if len(pipeline_stages(ranks)) > 1:
        return message("pipeline_stages_not_replayed")
    if not all((folder / KEPT.format(rank)).is_file() for rank in range(len(ranks))):
        return message("batches_not_kept")
    return None


def _play(plan: ScriptPlan, ranks: Sequence[ScriptRecord], work: Path, run: Run, in_turn: bool) -> ReplayRecord:
    folder, steps = Path(plan.out) / REPLAY_FOLDER, ranks[0].steps
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    replay_plan = ReplayPlan(
        record=plan.out,
        ranks=len(ranks),
        work=str(work),
        rates=[step.rates for step in steps],
        micro_batches=[len(step.micro_batches) for step in steps],
        in_turn=in_turn,
        calls=[step.calls for step in steps],
        alone=ranks[0].alone,
    )
    of_one_process = replace(plan, out=str(folder), script=_script(plan), steps=len(steps), keep=False)
    write(folder / PLAN, replace(of_one_process, replay=replay_plan))
    run(folder)
    return read(ReplayRecord, folder / REPLAYED)


def _script(plan: ScriptPlan) -> str:
    """Returns a script's path relative to the working directory, of which the copy has one; others stay absolute."""
    if plan.module:
        return plan.script
    script = Path(plan.script).absolute()
    inside = script.is_relative_to(Path.cwd())
    return str(script.relative_to(Path.cwd()) if inside else script)


def copy_folder(source: Path, target: Path, since: float, without: Path) -> None:
    """Copies a folder's small files and links its large ones.

    Leaves out the folder `without`, and files that have changed since `since`, in seconds of the epoch.
    """
    _copy(source, target, since, without.resolve(), [ALL])


def _copy(source: Path, target: Path, since: float, without: Path, left: list[int]) -> None:
    """left: how many more entries may be copied, in its one element."""
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
