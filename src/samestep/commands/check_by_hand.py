"""Replays a script that may divide its model itself, and judges it as such where one process shows that it does."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from samestep.commands.check_replay import Replayer, Run
from samestep.errors import TrainingFailed, UserError
from samestep.judge import without_by_hand
from samestep.judge.against_one_process import not_replayed
from samestep.judge.by_hand import Division
from samestep.judge.judge_by_hand import by_hand_findings, held_findings
from samestep.judge.layout import ByHand, Layout
from samestep.judge.same_pieces import Unclipped, findings_along_data, unclipped_gradients
from samestep.message import Message, message
from samestep.records.findings import CheckResults
from samestep.records.record import Record
from samestep.records.script import ScriptRecord
from samestep.records.script_plan import ReplayRecord, ScriptPlan


def judged_by_hand(
    results: CheckResults, plan: ScriptPlan, ranks: Sequence[ScriptRecord], record: Record, run: Run
) -> CheckResults | None:
    """Returns the results of a script that divides its model itself; None where it does not, and is to be judged as any
    other."""
    layout = Layout.of(ranks).by_hand
    if layout is None:
        return None
    if layout.holds_own:
        why = message("layers_divided_by_hand", ranks=layout.replicas[0])
        return without_by_hand(results, layout, [not_replayed(why)])
    replayer = Replayer(plan, ranks, run, layout)
    played = _played(replayer, layout)
    division = None if isinstance(played, Message) else Division.of(layout, ranks, played[0])
    if division is None or isinstance(played, Message):
        why = played if isinstance(played, Message) else played[0].why_not or message("pieces_in_one_process")
        if not layout.is_certain:
            return None
        noted = replace(results, notes=[layout.described(), *results.notes]) if layout.is_one_model else results
        return without_by_hand(noted, layout, [*findings_along_data(layout, ranks, record), not_replayed(why)])
    result, told_ranks = played
    noted = replace(results, notes=[division.described(), *results.notes]) if division.held else results
    one_process = replayer.one_process
    if result.why_not or len(one_process.steps) != len(ranks[0].steps):
        why = result.why_not or message(
            "replay_takes_other_steps", steps=len(one_process.steps), recorded=len(ranks[0].steps)
        )
        return without_by_hand(noted, layout, [*held_findings(division, ranks, record), not_replayed(why)])

    def unclipped() -> Unclipped | None:
        with replayer.work() as work, suppress(TrainingFailed, UserError):
            again = replayer.play(work, told_ranks=told_ranks, small_gradients=True)
            if not again.why_not and replayer.one_process.steps:
                return unclipped_gradients(layout, replayer.record)
        return None

    findings = by_hand_findings(
        division,
        ranks,
        one_process,
        result,
        record=record,
        replay=replayer.record,
        told_ranks=told_ranks,
        unclipped=unclipped,
    )
    return without_by_hand(noted, layout, findings)


def _played(replayer: Replayer, layout: ByHand) -> tuple[ReplayRecord, int] | Message:
    """Returns how the replay went, and of how many ranks the script was told; or why there is none."""
    if why := replayer.why_not():
        return why
    with replayer.work() as work:
        return replayer.first_that_ends(work, (1, layout.size, len(replayer.ranks)))
