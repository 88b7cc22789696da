"""Whether two recordings took the same steps: before and after a change, with other versions, or after a resume."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from samestep.errors import TrainingFailed
from samestep.proof.script import resumed
from samestep.proof.script.replay import FIRST, LATER, WEIGHTS, coarser_of
from samestep.proof.script.step_gradients import Array, norm, of_ranks, whole
from samestep.proof.script.updates import Ranks, common_steps, differs, many
from samestep.records.record import Record
from samestep.records.replay import END, START
from samestep.records.script import TAKEN, Finding, StepSeen

EXACT = "the same to the last bit"


@dataclass(frozen=True)
class RecordPair:
    """Two recordings, and their folders. since: the step of the first with which the second begins."""

    one: Ranks
    other: Ranks
    record: Record
    second: Record
    since: int = 0

    @property
    def steps(self) -> int:
        """How many steps can be compared: those that every rank of both has taken."""
        return max(0, min(len(common_steps(self.one)) - self.since, len(common_steps(self.other))))

    @property
    def ends_together(self) -> bool:
        """Whether no rank has taken a step that is not compared."""
        ahead = (len(rank.steps) - self.since > self.steps for rank in self.one)
        return not any(ahead) and all(len(rank.steps) == self.steps for rank in self.other)

    def seen(self, number: int) -> tuple[StepSeen, StepSeen]:
        """Returns rank 0's part of the second's step `number`, and of the first's beside it, which comes first."""
        return self.one[0].steps[self.since + number], self.other[0].steps[number]

    def taken(self, number: int) -> tuple[dict[str, Array], dict[str, Array]]:
        """Returns the gradients that the optimizers took in these steps."""
        return _taken(self.one, self.record, self.since + number), _taken(self.other, self.second, number)


def compare(of: RecordPair) -> list[Finding]:
    """Answers what is the same in two recordings, in the order in which a step goes."""
    if not of.steps:
        return [Finding("steps", "unknown", "a record has no step")]
    short = "" if of.ends_together else " (as many as both have)"
    after = f", from step {of.since} of the first on" if of.since else ""
    return [
        Finding("steps", "right", f"{many(of.steps, 'step')} are compared{short}{after}"),
        _start(of),
        _rows(of),
        _gradients(of),
        _rates(of),
        _weights(of),
    ]


def _start(of: RecordPair) -> Finding:
    question, one, other = "initial weights", of.one[0], of.other[0]
    if not one.start or not other.start:
        return Finding(question, "unknown", "a record has no whole weights (sharded parameters)")
    names = _other_names(one.start.keys(), other.start.keys())
    if names:
        cause = f"the models have other parameters: {', '.join(names[:3])}{', …' * (len(names) > 3)}"
        return differs(question, "parameters", cause, expected=len(one.start), found=len(other.start), tensor=names[0])
    wanted = resumed.weights_before(one, of.since)
    wrong = [name for name in wanted if wanted[name] != other.start[name]]
    if wrong:
        cause = f"{len(wrong)} of {len(one.start)} parameters have other initial values: another seed, or other code"
        if of.since:
            cause = resumed.weights_cause(one, other, of.since, wrong)
        shown = {"expected": f"{wanted[wrong[0]]:x}"[:8], "found": f"{other.start[wrong[0]]:x}"[:8]}
        return differs(question, "initial weights", cause, tensor=wrong[0], **shown)
    when = f", as after {many(of.since, 'step')} of the first" if of.since else ""
    return Finding(question, "right", f"{many(len(one.start), 'parameter')}, {EXACT}{when}")


def _other_names(first: Sequence[str] | object, second: Sequence[str] | object) -> list[str]:
    return sorted({*first} ^ {*second})  # type: ignore[misc]


def _rows(of: RecordPair) -> Finding:
    """Whether all ranks together train with the same rows at each step."""
    moved = False
    for number in range(of.steps):
        step = of.since + number
        first, second = resumed.rows_of(of.one, step), resumed.rows_of(of.other, number)
        wrong = Counter(row for rank in first for row in rank) - Counter(row for rank in second for row in rank)
        count = sum(map(len, first)), sum(map(len, second))
        if wrong or count[0] != count[1]:
            cause = (
                f"{sum(wrong.values())} of the {count[0]} rows of the first are not in the second: another seed, "
                "sampler, order or transform"
            )
            if of.since:
                cause = resumed.rows_cause(of.one, step, second)
            rank = next((r for r, rows in enumerate(first) if {*rows} & {*wrong}), None)
            shown = {
                "expected": f"{count[0]} rows",
                "found": f"{count[1]} rows, {count[0] - sum(wrong.values())} of them",
            }
            return differs("rows", "rows of all ranks", cause, step=step, rank=rank, **shown)
        moved |= first != second
    how = ", otherwise spread over ranks and micro-batches" if moved else ", on the same ranks"
    return Finding("rows", "right", f"the same at each step{how}")


def _gradients(of: RecordPair) -> Finding:
    question, worst, first = "gradient", 0.0, 0.0
    coarser, compared = coarser_of(of.one), 0
    for number in range(of.steps):
        step = of.since + number
        theirs, mine = of.taken(number)
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
        first = first if number else worst
        if not off[name] <= (LATER if number else FIRST) * coarser * size:
            cause = (
                "the same weights and rows gave another gradient: the loss, its scale, clipping, dropout or precision"
            )
            if number:
                cause = "another gradient, after weights that were close: a step before, this step's loss, or dropout"
            elif of.since:
                cause = resumed.GRADIENT
            shown = {"expected": f"a norm of {norm(theirs[name]):.6g}", "found": f"a norm of {norm(mine[name]):.6g}"}
            return differs(question, "gradient", cause, step=step, tensor=name, **shown)
    if not compared:
        return Finding(question, "unknown", "no step has the gradients of all parameters in both records")
    same = EXACT if not worst else f"to {first:.0e} of its norm at the first step, {worst:.0e} at the worst"
    return Finding(question, "right", f"what the optimizer took is {same}")


def _taken(ranks: Ranks, record: Record, step: int) -> dict[str, Array]:
    shards = ranks[0].steps[step].shards
    return whole(of_ranks(record, ranks if shards else ranks[:1], step), TAKEN, shards)[0]


def _rates(of: RecordPair) -> Finding:
    for number in range(of.steps):
        step = of.since + number
        first, second = (each.rates for each in of.seen(number))
        if not resumed.same_rates(first, second):
            cause = "the steps use other learning rates: another schedule, or parameter groups"
            if of.since:
                cause = resumed.rate_cause(of.one[0], step, second)
            return differs("rate", "learning rate", cause, step=step, rank=0, expected=first, found=second)
    return Finding("rate", "right", "the same at each step")


def _weights(of: RecordPair) -> Finding:
    question = "weights"
    pairs = [of.seen(number) for number in range(of.steps)]
    apart = next((i for i, (first, second) in enumerate(pairs) if first.weights != second.weights), None)
    if apart is None and pairs[0][0].weights:
        return Finding(question, "right", f"{EXACT} after each of {many(of.steps, 'step')}")
    if of.since and apart == 0 and (name := _moved_otherwise(of)):
        digests = {"expected": f"{pairs[0][0].weights[name]:x}"[:8], "found": f"{pairs[0][1].weights[name]:x}"[:8]}
        return differs(question, "weights after the step", resumed.OPTIMIZER, step=of.since, tensor=name, **digests)
    if not of.ends_together:
        until = "no whole weights" if apart is None else f"not bitwise equal from step {of.since + apart} on"
        return Finding(question, "unknown", f"{until}; the records end at different steps")
    try:
        start, ends = of.second.arrays(START), [each.arrays(END) for each in (of.record, of.second)]
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
    bound = WEIGHTS * coarser_of(of.one)
    if not distance <= bound:
        cause = "the final weights differ: the optimizer, its settings, or code outside it that changes the weights"
        shown = {"expected": f"at most {bound:g} of the movement", "found": round(distance, 6)}
        return differs(question, "weights", cause, step=of.since + of.steps - 1, tensor=name, **shown)
    return Finding(question, "right", f"after {many(of.steps, 'step')} the same to {distance:.0e} of their movement")


def _moved_otherwise(of: RecordPair) -> str:
    """Returns a parameter that the first step moves otherwise, from the same bits of weights and gradients, and at the
    same rates; '' where there is none, or these are not the same."""
    wanted, start = resumed.weights_before(of.one[0], of.since), of.other[0].start
    (first, second), (theirs, mine) = of.seen(0), of.taken(0)
    if (
        not wanted
        or wanted != start
        or theirs.keys() != mine.keys()
        or not resumed.same_rates(first.rates, second.rates)
    ):
        return ""
    if any(not np.array_equal(theirs[name], mine[name]) for name in theirs):
        return ""
    shared = [name for name in first.weights if name in second.weights]
    return next((name for name in shared if first.weights[name] != second.weights[name]), "")
