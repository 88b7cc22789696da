"""Plays a recorded script again in one process, in a copy of the working directory."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from samestep.commands.check_folder import copy_folder
from samestep.errors import TrainingFailed, UserError
from samestep.proof.script.replay import not_replayed, replayed
from samestep.proof.script.stages import STAGES, stages
from samestep.records.files import read, write
from samestep.records.record import Record
from samestep.records.replay import FOLDER, KEPT, REPLAYED, Replayed, ReplayPlan
from samestep.records.script import PLAN, Finding, ScriptPlan, ScriptRecord
from samestep.report.language import text

Run = Callable[[Path], Record]  # runs the plan in a folder, in one process


def replay(plan: ScriptPlan, ranks: Sequence[ScriptRecord], record: Record, run: Run) -> list[Finding]:
    """Plays a script's record in one process; answers whether it has taken the same steps.

    Raises UserError where the launch is a mistake of the user's.
    """
    folder = Path(plan.out)
    if not min(len(rank.steps) for rank in ranks):
        return [not_replayed("there is no step")]
    if len(stages(ranks)) > 1:
        return [not_replayed(STAGES)]
    if not all((folder / KEPT.format(rank)).is_file() for rank in range(len(ranks))):
        return [not_replayed("the ranks' batches were not kept")]
    with tempfile.TemporaryDirectory(prefix="samestep-replay-") as kept:
        work = Path(kept) / "work"
        copy_folder(Path.cwd(), work, plan.started_at, folder)
        try:
            played = _play(plan, ranks, work, run, in_turn=False)
            if played.needs_turns:
                played = _play(plan, ranks, work, run, in_turn=True)
        except (TrainingFailed, UserError) as error:
            return [not_replayed(f"in one process the script fails: {text(error.message)}")]
    one = Record(folder / FOLDER)
    return replayed(played, ranks, read(ScriptRecord, folder / FOLDER / "rank0.json"), record, one)


def _play(plan: ScriptPlan, ranks: Sequence[ScriptRecord], work: Path, run: Run, in_turn: bool) -> Replayed:
    folder = Path(plan.out) / FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    steps = ranks[0].steps
    rates, micro = [step.rates for step in steps], [len(step.micro) for step in steps]
    of = ReplayPlan(plan.out, len(ranks), str(work), rates, micro, in_turn, [step.calls for step in steps])
    write(
        folder / PLAN,
        replace(plan, out=str(folder), script=_script(plan), steps=len(steps), keep=False, replay=of),
    )
    run(folder)
    return read(Replayed, folder / REPLAYED)


def _script(plan: ScriptPlan) -> str:
    """Returns a script's path relative to the working directory, of which the copy has one; others stay absolute."""
    if plan.module:
        return plan.script
    script = Path(plan.script).absolute()
    inside = script.is_relative_to(Path.cwd())
    return str(script.relative_to(Path.cwd()) if inside else script)
