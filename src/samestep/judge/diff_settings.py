"""Compares the settings of two recordings: precision, clipping, the optimizer's numbers, schedules, the order of later
rows.

Differences are told also where the recorded steps do not show them, as a limit of clipping that no gradient has
reached.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from samestep.bounds import SETTING_APART
from samestep.judge.findings import Ranks, differs
from samestep.judge.record_pair import RecordPair
from samestep.judge.rows import indices, trained
from samestep.message import message
from samestep.proof.resumed_step import same_rates
from samestep.records.findings import Finding
from samestep.records.script import PassRecord, ScriptRecord, StepRecord

SHOWN = 4  # indices
RATE = "lr"
Settings = Mapping[str, Mapping[str, Any]]  # parameter -> name -> value
BY_FUNCTION = ("LambdaLR", "MultiplicativeLR")  # schedules that call a function of the user's
KEEPS_NOT_ALL = ("OneCycleLR",)  # only its functions know its final rate


def precision(pair: RecordPair) -> list[Finding]:
    """Judges whether the steps compute in the same dtypes."""
    for number in range(pair.steps):
        first, second = ({*step.dtypes, *step.computed} for step in pair.steps_of_rank_0(number))
        if first != second:
            cause = message("computed_in_other_dtypes")
            expected, found = sorted(first), sorted(second)
            # Weights of another dtype begin with other bits.
            step = None if pair.first[0].start != pair.second[0].start else number
            return [differs("precision", "dtypes", cause, step=step, expected=expected, found=found)]
    return [Finding("precision", "right", message("computed_in_the_same_dtypes"))]


def clipping(pair: RecordPair) -> list[Finding]:
    """Judges whether the steps clip to the same limits, where both clip by torch's functions."""
    clips = False
    for number in range(pair.steps):
        first, second = (_limits(step) for step in pair.steps_of_rank_0(number))
        if first and second and not _same(first, second):
            cause = message("clipped_to_another_limit")
            return [differs("clipping", "limit of clipping", cause, step=number, expected=first, found=second)]
        clips |= bool(first and second)
    return [Finding("clipping", "right", message("clipped_to_the_same_limit"))] if clips else []


def _limits(step: StepRecord) -> list[float]:
    return sorted({clip.limit for clip in step.clips if clip.limit is not None and clip.limit < math.inf})


def settings(pair: RecordPair) -> list[Finding]:
    """Compares the learning rate and the other numbers that move each parameter, in whatever groups these are."""
    known = False
    rates_differ = others_differ = None
    of_first, of_second = _in_force(pair.first[0]), _in_force(pair.second[0])
    for number in range(pair.steps):
        first, second = of_first[number], of_second[number]
        shared = [name for name in first if name in second]
        known |= bool(shared)
        if rates_differ is None:
            rates_differ = _rate(pair, number, first, second, shared)
        if others_differ is None:
            others_differ = _other(number, first, second, shared)
    rate = rates_differ or Finding("rate", "right", message("rates_are_the_same_in_both"))
    if others_differ:
        return [rate, others_differ]
    return [rate, Finding("settings", "right", message("same_settings"))] if known else [rate]


def _in_force(rank: ScriptRecord) -> list[Settings]:
    """Returns the settings of each step: those that its optimizer has had last."""
    latest: dict[int, Settings] = {}
    found: list[Settings] = []
    for step in rank.steps:
        if step.settings:
            latest[step.optimizer] = {name: group.values for group in step.settings for name in group.parameters}
        found.append(latest.get(step.optimizer, {}))
    return found


def _rate(pair: RecordPair, number: int, first: Settings, second: Settings, shared: Sequence[str]) -> Finding | None:
    steps = pair.steps_of_rank_0(number)
    cause = message("steps_use_other_rates")
    if not shared:
        rates = [step.rates for step in steps]
        if same_rates(*rates):
            return None
        return differs("rate", "learning rate", cause, step=number, rank=0, expected=rates[0], found=rates[1])
    for name in shared:
        rate, found = first[name].get(RATE), second[name].get(RATE)
        if rate is not None and found is not None and not _same(rate, found):
            return differs("rate", "learning rate", cause, step=number, tensor=name, expected=rate, found=found)
    return None


def _other(number: int, first: Settings, second: Settings, shared: Sequence[str]) -> Finding | None:
    for name in shared:
        for key in (key for key in first[name] if key != RATE and key in second[name]):
            values = first[name][key], second[name][key]
            if not _same(*values):
                expected, found = (message("setting_is", name=key, value=value) for value in values)
                cause = message("optimizer_set_otherwise", name=key)
                what = "setting of the optimizer"
                return differs("settings", what, cause, step=number, tensor=name, expected=expected, found=found)
    return None


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(_same, first, second))
    if isinstance(first, int | float) and isinstance(second, int | float):
        return math.isclose(first, second, rel_tol=SETTING_APART)
    return bool(first == second)


def schedules(pair: RecordPair) -> list[Finding]:
    """Judges whether schedules of the same classes were made with the same numbers: they act after the recorded steps,
    too."""
    first, second = pair.first[0].schedules, pair.second[0].schedules
    if not first or [schedule.kind for schedule in first] != [schedule.kind for schedule in second]:
        return []
    for first_schedule, second_schedule in zip(first, second):
        length = {"length": first_schedule.length}, {"length": second_schedule.length}
        values = {**length[0], **first_schedule.values}, {**length[1], **second_schedule.values}
        for key in values[0]:
            if key in values[1] and not _same_in_groups(values[0][key], values[1][key]):
                expected, found = (message("setting_is", name=key, value=side[key]) for side in values)
                cause = message("schedule_made_otherwise", kind=first_schedule.kind)
                what = "setting of the schedule"
                return [differs("schedule", what, cause, step=pair.steps, expected=expected, found=found)]
    untold = [
        ours.kind for ours in first if ours.kind in KEEPS_NOT_ALL or (ours.kind in BY_FUNCTION and not ours.values)
    ]
    if untold:
        return [Finding("schedule", "unknown", message("schedule_not_known_later", kind=untold[0]))]
    return [Finding("schedule", "right", message("same_schedules"))]


def _same_in_groups(first: Any, second: Any) -> bool:
    """Returns whether numbers are the same; a list may have one for each group, of which there may be more."""
    if isinstance(first, list) and isinstance(second, list) and len(first) != len(second):
        return _same(sorted({*map(str, first)}), sorted({*map(str, second)}))
    return _same(first, second)


def order(pair: RecordPair) -> list[Finding]:
    """Judges whether what the epoch would have read after the recorded steps is the same, and whether set_epoch is
    called."""
    first, second = (_first_pass(ranks) for ranks in (pair.first, pair.second))
    if first is None or second is None:
        return []
    same_data = first.dataset == second.dataset and first.length == second.length
    if same_data and first.sampler == second.sampler:
        set_in = [bool(ranks[0].epochs_set) for ranks in (pair.first, pair.second)]
        if first.sampler == "DistributedSampler" and set_in[0] != set_in[1]:
            cause = message("set_epoch_in_one")
            calls = [ranks[0].epochs_set for ranks in (pair.first, pair.second)]
            what = "calls of set_epoch"
            return [differs("order", what, cause, step=pair.steps, expected=calls[0], found=calls[1])]
    wanted, read = indices(first), indices(second)
    if not same_data or wanted is None or read is None or wanted == read:
        return []
    # Rows that are shared out in another way from the start are judged by their contents on all ranks.
    done = min(_rows_read(first), _rows_read(second))
    if not done or wanted[:done] != read[:done]:
        return []
    cause = message("rest_of_the_epoch_in_another_order")
    expected, found = wanted[done : done + SHOWN], read[done : done + SHOWN]
    return [differs("order", "rows", cause, step=pair.steps, rank=0, expected=expected, found=found)]


def _first_pass(ranks: Ranks) -> PassRecord | None:
    return next(iter(trained(ranks[0])), None)


def _rows_read(record: PassRecord) -> int:
    return sum(len(batch or ()) for batch in record.batches)
