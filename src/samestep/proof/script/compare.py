"""Whether two recordings took the same steps: of a script before and after a change, or with other versions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from samestep.errors import TrainingFailed
from samestep.proof.script.replay import FIRST, LATER, WEIGHTS, coarser_of
from samestep.proof.script.step_gradients import Array, norm, of_ranks, whole
from samestep.proof.script.updates import Ranks, differs, many
from samestep.records.record import Record
from samestep.records.replay import END, START
from samestep.records.script import TAKEN, Finding, ScriptRecord

EXACT = "the same to the last bit"


def steps_of(one: Ranks, other: Ranks) -> int:
    """Returns how many steps every rank of two recordings has taken."""
    return min(len(rank.steps) for rank in (*one, *other))


def compare(one: Ranks, other: Ranks, record: Record, second: Record) -> list[Finding]:
    """Answers what is the same in two recordings, in the order in which a step goes. record, second: their folders."""
    steps = steps_of(one, other)
    if not steps:
        return [Finding("steps", "unknown", "a record has no step")]
    short = " (as many as both have)" if any(len(rank.steps) > steps for rank in (*one, *other)) else ""
    return [
        Finding("steps", "right", f"{many(steps, 'step')} are compared{short}"),
        _start(one[0], other[0]),
        _rows(one, other, steps),
        _gradients(one, other, record, second, steps),
        _rates(one, other, steps),
        _weights(one, other, record, second, steps),
    ]


def _start(one: ScriptRecord, other: ScriptRecord) -> Finding:
    question = "initial weights"
    if not one.start or not other.start:
        return Finding(question, "unknown", "a record has no whole weights (sharded parameters)")
    names = _other_names(one.start.keys(), other.start.keys())
    if names:
        cause = f"the models have other parameters: {', '.join(names[:3])}{', …' * (len(names) > 3)}"
        return differs(question, "parameters", cause, expected=len(one.start), found=len(other.start), tensor=names[0])
    wrong = [name for name in one.start if one.start[name] != other.start[name]]
    if wrong:
        cause = f"{len(wrong)} of {len(one.start)} parameters are initialised otherwise: another seed, or other code"
        shown = {"expected": f"{one.start[wrong[0]]:x}"[:8], "found": f"{other.start[wrong[0]]:x}"[:8]}
        return differs(question, "initial weights", cause, tensor=wrong[0], **shown)
    return Finding(question, "right", f"{many(len(one.start), 'parameter')}, {EXACT}")


def _other_names(first: Sequence[str] | object, second: Sequence[str] | object) -> list[str]:
    return sorted({*first} ^ {*second})  # type: ignore[misc]


def _rows(one: Ranks, other: Ranks, steps: int) -> Finding:
    """Whether all ranks together train with the same rows at each step."""
    moved = False
    for step in range(steps):
        first, second = _rows_of(one, step), _rows_of(other, step)
        wrong = Counter(row for rank in first for row in rank) - Counter(row for rank in second for row in rank)
        count = sum(map(len, first)), sum(map(len, second))
        if wrong or count[0] != count[1]:
            cause = (
                f"{sum(wrong.values())} of the {count[0]} rows of the first are not in the second: another seed, "
                "sampler, order or transform"
            )
            rank = next((r for r, rows in enumerate(first) if {*rows} & {*wrong}), None)
            shown = {
                "expected": f"{count[0]} rows",
                "found": f"{count[1]} rows, {count[0] - sum(wrong.values())} of them",
            }
            return differs("rows", "rows of all ranks", cause, step=step, rank=rank, **shown)
        moved |= first != second
    how = ", otherwise spread over ranks and micro-batches" if moved else ", on the same ranks"
    return Finding("rows", "right", f"the same at each step{how}")


def _rows_of(ranks: Ranks, step: int) -> list[list[str]]:
    return [[row for micro in rank.steps[step].micro for row in micro.rows] for rank in ranks]


def _gradients(one: Ranks, other: Ranks, record: Record, second: Record, steps: int) -> Finding:
    question, worst, first = "gradient", 0.0, 0.0
    coarser, compared = coarser_of(one), 0
    for step in range(steps):
        theirs, mine = _taken(one, record, step), _taken(other, second, step)
        names = [name for name in theirs if name in mine and theirs[name].shape == mine[name].shape]
        if not names or len(names) < max(len(theirs), len(mine)):
            continue
        if any(not np.isfinite(each[name]).all() for each in (theirs, mine) for name in names):
            return Finding(question, "unknown", f"a gradient holds NaN or an infinity at step {step}")
        compared += 1
        size = math.sqrt(sum(norm(theirs[name]) ** 2 for name in names)) or 1.0
        off = {name: norm(theirs[name] - mine[name]) for name in names}
        name = max(off, key=lambda each: off[each])
        worst = max(worst, off[name] / size)
        first = first if step else worst
        if not off[name] <= (LATER if step else FIRST) * coarser * size:
            cause = (
                "from the same weights and rows another gradient: the loss, its scale, clipping, dropout or precision"
            )
            if step:
                cause = "another gradient, after weights that were close: a step before, this step's loss, or dropout"
            shown = {"expected": f"a norm of {norm(theirs[name]):.6g}", "found": f"a norm of {norm(mine[name]):.6g}"}
            return differs(question, "gradient", cause, step=step, tensor=name, **shown)
    if not compared:
        return Finding(question, "unknown", "no step has the gradients of all parameters in both records")
    same = EXACT if not worst else f"to {first:.0e} of its norm at the first step, {worst:.0e} at the worst"
    return Finding(question, "right", f"what the optimizer took is {same}")


def _taken(ranks: Ranks, record: Record, step: int) -> dict[str, Array]:
    shards = ranks[0].steps[step].shards
    return whole(of_ranks(record, ranks if shards else ranks[:1], step), TAKEN, shards)[0]


def _rates(one: Ranks, other: Ranks, steps: int) -> Finding:
    for step in range(steps):
        first, second = one[0].steps[step].rates, other[0].steps[step].rates
        if len(first) != len(second) or not all(math.isclose(*pair, rel_tol=1e-6) for pair in zip(first, second)):
            cause = "the steps are taken at other rates: another schedule, or parameter groups"
            return differs("rate", "learning rate", cause, step=step, rank=0, expected=first, found=second)
    return Finding("rate", "right", "the same at each step")


def _weights(one: Ranks, other: Ranks, record: Record, second: Record, steps: int) -> Finding:
    question = "weights"
    first = [step.weights for step in one[0].steps[:steps]]
    apart = next((i for i, each in enumerate(first) if each != other[0].steps[i].weights), None)
    if apart is None and first[0]:
        return Finding(question, "right", f"{EXACT} after each of {many(steps, 'step')}")
    if any(len(rank.steps) > steps for rank in (*one, *other)):
        return Finding(
            question, "unknown", f"no more the same bits after step {apart}; the last steps are not the same"
        )
    try:
        start, ends = record.arrays(START), [each.arrays(END) for each in (record, second)]
    except TrainingFailed:
        return Finding(question, "unknown", "the weights were not kept (--no-replay, or one rank)")
    names = [
        name for name in ends[0] if name in ends[1] and name in start and ends[0][name].shape == ends[1][name].shape
    ]
    moved = math.sqrt(sum(norm(ends[0][name].astype(float) - start[name]) ** 2 for name in names))
    off = {name: norm(ends[0][name].astype(float) - ends[1][name]) for name in names}
    if not names or not moved:
        return Finding(question, "unknown", "no weight that both records have moves")
    name = max(off, key=lambda each: off[each])
    distance = math.sqrt(sum(each**2 for each in off.values())) / moved
    bound = WEIGHTS * coarser_of(one)
    if not distance <= bound:
        cause = "the steps end elsewhere: the optimizer, its settings, or what changes the weights beside it"
        shown = {"expected": f"at most {bound:g} of the movement", "found": round(distance, 6)}
        return differs(question, "weights", cause, step=steps - 1, tensor=name, **shown)
    return Finding(question, "right", f"after {many(steps, 'step')} the same to {distance:.0e} of their movement")
