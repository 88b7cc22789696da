"""Plays a recorded script again in one process, in a copy of the working directory.

The replay writes no file of the user's, and reads none that the recording has written.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from samestep.commands.working_copy import LEVELS, work_folder
from samestep.errors import TrainingFailed, UserError
from samestep.judge.against_one_process import judge_replay, not_replayed
from samestep.judge.assembled import ReplicaRecord, of_replicas
from samestep.judge.evaluation import evaluates_loaders, evaluation
from samestep.judge.first_module import with_module, with_places
from samestep.judge.layout import ByHand, Layout, TensorLayout
from samestep.judge.replica_causes import cause_within_replica
from samestep.judge.replicas import of_one_replica
from samestep.judge.reported_values import QUESTION as VALUES
from samestep.judge.reported_values import ReportedValues, fed_several_times, judge_values, why_not_judged
from samestep.judge.rows import share_inputs
from samestep.judge.warnings import leaves_training_mode
from samestep.message import Message, as_said, message
from samestep.records.files import read, write
from samestep.records.findings import Finding
from samestep.records.record import Record
from samestep.records.script import ScriptRecord
from samestep.records.script_plan import KEPT, PLAN, REPLAY_FOLDER, REPLAYED, ReplayPlan, ReplayRecord, ScriptPlan
from samestep.world.regular_files import make_folder, remove_made_folder

Run = Callable[[Path], Record]  # runs the plan in a folder, in one process


@dataclass(frozen=True)
class Replayer:
    """Plays the record of a script in one process."""

    plan: ScriptPlan
    """The plan of the recording."""

    ranks: Sequence[ScriptRecord]
    """The records of the ranks."""

    run: Run
    """Called with a folder. Runs the plan that lies there."""

    layout: TensorLayout | ByHand | None
    """How the ranks share out a model. None: they do not."""

    @property
    def record(self) -> Record:
        """The folder of the replay that was played last."""
        return Record(Path(self.plan.out) / REPLAY_FOLDER)

    @property
    def one_process(self) -> ScriptRecord:
        """What the one process of the last replay has recorded."""
        return read(ScriptRecord, self.record.folder / "rank0.json")

    def why_not(self) -> Message | None:
        """Returns why the record cannot be replayed; None where it may."""
        kept = all((Path(self.plan.out) / KEPT.format(rank)).is_file() for rank in range(len(self.ranks)))
        return None if kept else message("batches_not_kept")

    @contextmanager
    def work(self) -> Iterator[Path]:
        """Yields a copy of the working directory."""
        with tempfile.TemporaryDirectory(prefix="samestep-replay-") as temporary:
            yield work_folder(self.plan, Path(temporary))

    def first_that_ends(self, work: Path, told_ranks: Iterable[int]) -> tuple[ReplayRecord, int] | Message:
        """Plays the record, told of one number of ranks after the other, until a replay ends. Returns (the replay, the
        number); the error of the last one where none ends: it was told as many ranks as the recorded script."""
        why = message("no_step_to_replay")
        for told in dict.fromkeys(told_ranks):
            try:
                return self.play(work, told_ranks=told), told
            except (TrainingFailed, UserError) as failure:
                why = _why_failed(failure)
        return why

    def play(
        self,
        work: Path,
        *,
        told_ranks: int = 1,
        in_turn: bool = False,
        small_gradients: bool = False,
        changes: Literal["", "evaluation", "clock"] = "",
    ) -> ReplayRecord:
        """Plays the record once, in a copy of the working directory.

        told_ranks: how many ranks the script is told of. in_turn: whether it is fed with the ranks' batches one after
        the other. small_gradients: plays the first step alone, with small gradients, which nothing clips.
        changes: as of ReplayPlan. Raises TrainingFailed where the script fails.
        """
        folder, ranks, layout, steps = self.record.folder, self.ranks, self.layout, self.ranks[0].steps
        # Files of another replay are not to be read as this one's.
        remove_made_folder(folder)
        make_folder(folder)
        replay_plan = ReplayPlan(
            record=self.plan.out,
            ranks=len(ranks),
            work=str(work),
            elsewhere=str(work.parents[LEVELS] / "elsewhere"),
            rates=[step.rates for step in steps],
            micro_batches=[len(step.micro_batches) for step in steps],
            in_turn=in_turn,
            calls=[step.calls for step in steps],
            alone=ranks[0].alone,
            readers=layout.readers(ranks) if layout else [],
            told_ranks=told_ranks,
            by_hand=layout.replicas if isinstance(layout, ByHand) else [],
            small_gradients=small_gradients,
            changes=changes,
        )
        count = 1 if small_gradients else len(steps)
        of_one_process = replace(
            self.plan, out=str(folder), script=_script(self.plan), steps=count, most_steps=0, keep=False
        )
        write(folder / PLAN, replace(of_one_process, replay=replay_plan))
        self.run(folder)
        return read(ReplayRecord, folder / REPLAYED)


def _why_failed(error: TrainingFailed | UserError) -> Message:
    said = error.message
    return said if said.id == "replay_took_too_long" else message("script_fails_in_one_process", error=said)


def _script(plan: ScriptPlan) -> str:
    """Returns a script's path relative to the working directory, of which the copy has one; others stay absolute."""
    if plan.module:
        return plan.script
    script = Path(os.path.abspath(plan.script))  # without the .. that a typed path may have
    inside = script.is_relative_to(Path.cwd())
    return str(script.relative_to(Path.cwd()) if inside else script)


def replay(plan: ScriptPlan, ranks: Sequence[ScriptRecord], record: Record, run: Run) -> list[Finding]:
    """Plays a script's record in one process; answers whether it has taken the same steps."""
    layout = Layout.of(ranks).tensors
    replayer = Replayer(plan, ranks, run, layout)
    if why := _why_not(ranks) or replayer.why_not():
        return [not_replayed(why)]
    # A script that divides the ranks by the size of a replica cannot run as one: it is told of a whole replica.
    told = (1, len(layout.replicas[0])) if layout else (1,)
    with replayer.work() as work:
        played = replayer.first_that_ends(work, told)
        if isinstance(played, Message):
            return [not_replayed(played)]
        result, told_ranks = played
        if result.needs_turns:
            try:
                result = replayer.play(work, in_turn=True, told_ranks=told_ranks)
            except (TrainingFailed, UserError) as error:
                return [not_replayed(_why_failed(error))]
        findings = _judged(result, replayer, record)
        if layout and told_ranks == len(ranks) > 1 and all(finding.answer == "right" for finding in findings):
            # A value that depends on this number changes with it; a script may take it for its number of replicas.
            with suppress(TrainingFailed):
                findings_again = _judged(replayer.play(work, told_ranks=2 * told_ranks), replayer, record)
                told_ranks = 1 if all(finding.answer == "right" for finding in findings_again) else told_ranks
        if any(rank.reports for rank in ranks) or evaluates_loaders(ranks):
            values = _evaluation_values(replayer, result, work, findings, told_ranks=told_ranks)
            findings = [*findings, values]
    if not layout:
        return with_places(findings, ranks, replayer.one_process) if result.feed == "whole" else findings

    def cause(step: int) -> Message | None:
        replicas, of_all = of_replicas(ranks, layout), ReplicaRecord(record.folder, ranks, layout)
        of_one = replayer.record
        return cause_within_replica(ranks, replicas, layout, record=of_all, replay=of_one, result=result, step=step)

    return with_modules([of_one_replica(finding, layout, told_ranks, cause) for finding in findings], plan, ranks)


def _evaluation_values(
    replayer: Replayer, result: ReplayRecord, work: Path, findings: Sequence[Finding], *, told_ranks: int
) -> Finding:
    """Judges what the script reports of its evaluations. Where a number is not that of one process, the script is
    played twice more, to see which numbers depend on the evaluations, and not on the clock."""
    ranks, one_process = replayer.ranks, replayer.one_process
    values = ReportedValues.of(ranks, one_process)
    is_apart = bool(values.apart())
    why = why_not_judged(ranks) if is_apart else None
    if told_ranks > 1:
        why = message("values_not_tried", why=message("ranks_share_out_the_model"))
    elif not values.numbers:
        why = message("values_not_reported")
    elif any(finding.answer != "right" for finding in findings):
        why = message("values_not_tried", why=message("evaluation_after_other_steps"))
    if why:
        return Finding(VALUES, "unknown", why)
    if finding := fed_several_times(ranks, one_process):
        return finding
    if not is_apart:
        return Finding(VALUES, "right", message("values_of_one_process", numbers=len(values.numbers)))
    in_turn = result.feed == "in turn"
    try:
        replayer.play(work, in_turn=in_turn, changes="clock")
        other_clock = replayer.one_process
        replayer.play(work, in_turn=in_turn, changes="evaluation")
    except (TrainingFailed, UserError) as error:
        return Finding(VALUES, "unknown", message("values_not_tried", why=as_said(error.message)))
    depending = values.depending(other_clock=other_clock, other_evaluation=replayer.one_process)
    return judge_values(values, depending, padding=evaluation(ranks).message.fields.get("twice") or 0)


def _judged(result: ReplayRecord, replayer: Replayer, record: Record) -> list[Finding]:
    """Compares what was played last with the ranks, or their replicas."""
    ranks, layout, size = replayer.ranks, replayer.layout, len(replayer.ranks)
    if isinstance(layout, TensorLayout):
        ranks, record = of_replicas(ranks, layout), ReplicaRecord(record.folder, ranks, layout)
    return judge_replay(result, ranks, replayer.one_process, record, replayer.record, size=size)


def with_modules(findings: Sequence[Finding], plan: ScriptPlan, ranks: Sequence[ScriptRecord]) -> list[Finding]:
    """Returns findings; those of ranks that share out a model with the module that computes something else than in the
    replay, if there was one."""
    path, layout = Path(plan.out) / REPLAY_FOLDER / "rank0.json", Layout.of(ranks).tensors
    if layout is None or not layout.tensor or not path.exists():
        return [*findings]
    one_process, size = read(ScriptRecord, path), len(layout.replicas[0])
    return [with_module(finding, ranks, one_process, layout.axis, size) for finding in findings]


def _why_not(ranks: Sequence[ScriptRecord]) -> Message | None:
    """Returns why a record is not to be replayed; None where it is."""
    if not min(len(rank.steps) for rank in ranks):
        return message("no_step_to_replay")
    if Layout.of(ranks).kind == "stages":
        return message("pipeline_stages_not_replayed")
    if any(map(leaves_training_mode, ranks)):
        return message("trained_in_evaluation_mode")
    if share_inputs(ranks):
        return message("ranks_share_inputs")
    return None
