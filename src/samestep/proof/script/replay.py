"""Whether one process, fed with what the ranks have read, takes the steps that the ranks took."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from samestep.proof.script.gradients import HOOKED
from samestep.proof.script.step_gradients import Array, StepGradients, norm
from samestep.proof.script.updates import Ranks, differs, many
from samestep.records.record import Record
from samestep.records.replay import Replayed
from samestep.records.script import STEP, TAKEN, UNCLIPPED, Finding, ScriptRecord, of_kind

# Relative bounds of the first gradient, of later ones and of the weights' movement: see the decision record.
FIRST, LATER, WEIGHTS = 1e-4, 1e-2, 1e-2
COARSER = {"bfloat16": 300.0, "float16": 40.0}  # how much coarser than float32's the bounds are
NEAR = 1e-3
ROUNDING, GROWS = 1e-7, 1000.0  # of a gradient in float32; and by how much a chaotic training makes it grow in a step
INSIDE = (
    "at step {} the closure's last gradient is another one, to {:.0e} of {}: after {} calls inside of one step, "
    "rounding cannot be told from a mistake"
)
DRIFTS = (
    "after {} the gradients have come apart little by little ({}), as rounding does in a training that is very "
    "sensitive to its weights: what follows cannot be compared; a lower rate may show it"
)
HOW = {
    "whole": "the ranks' batches as one",
    "by rank": "the ranks' batches as one, which the model receives rank by rank, as dropout or BatchNorm needs",
    "in turn": "each rank's micro-batch in turn",
}
GRADIENT, RATE, WEIGHT, MICRO = "replayed gradient", "replayed rate", "replayed weights", "replayed micro-batches"
MEAN_OF_MEANS = (
    "the mean over ranks of each rank's mean is not the mean over all rows or targets: a loss is divided by the rank's "
    "own number of them, or of their weights, and these differ"
)
OTHER_LOSS = (
    "the ranks' gradient is not that of one process on the same rows, though each rank has as many rows and targets: "
    "the loss or the model depends on the rank, on the number of ranks, or on what else is in the batch (negatives of "
    "a contrastive loss, class weights, statistics)"
)
NOT_DIVIDED = (
    "the ranks' gradient is 1/{0} times that of one process, which accumulates {0} times as many micro-batches: the "
    "losses, or the gradients, are not divided by their number"
)
THE_STEP = "the step itself (clipping, optimizer, weight decay, averaging of weights) depends on the number of ranks"
THEN_APART = f"the gradients of the steps before are those of one process, and each rank has as many rows: {THE_STEP}"
STEPS_APART = f"the first gradients are those of one process, and come apart from step to step: {THE_STEP}"


def coarser_of(ranks: Ranks) -> float:
    """Returns how much coarser than float32's the bounds of a script are."""
    first = ranks[0].steps[0]
    return max(COARSER.get(dtype, 1.0) for dtype in [*first.dtypes, *first.computed] or ["float32"])


def not_replayed(why: str) -> Finding:
    """Returns the answer where there is no replay to judge."""
    return Finding("replay", "unknown", f"not replayed: {why}")


def replayed(result: Replayed, ranks: Ranks, one: ScriptRecord, record: Record, replay: Record) -> list[Finding]:
    """Compares a replay with the ranks. record, replay: the folders with the gradients."""
    mine = len(ranks[0].steps[0].micro)
    if result.why_not and result.micro >= 0 and result.micro not in (mine, mine * len(ranks)):
        return [_micro_batches(result, ranks)]
    if result.why_not:
        return [not_replayed(result.why_not)]
    if len(one.steps) != len(ranks[0].steps):
        why = f"in one process the script takes {many(len(one.steps), 'step')}, and {len(ranks[0].steps)} on the ranks"
        return [not_replayed(why)]
    coarser = coarser_of(ranks)
    findings = [_gradients(ranks, one, record, replay, coarser, result), _rates(result, ranks, one)]
    if (findings[0].question, findings[0].answer) == (GRADIENT, "unknown"):
        return [*findings, Finding(WEIGHT, "unknown", "the gradients have come apart before")]
    return [*findings, _weights(result, len(one.steps), coarser)]


def _micro_batches(result: Replayed, ranks: Ranks) -> Finding:
    mine = len(ranks[0].steps[0].micro)
    cause = (
        f"how many micro-batches are accumulated depends on the number of ranks: {mine} on each of {len(ranks)}, and "
        f"{result.micro} in one process, where the same batch takes {mine} or {mine * len(ranks)}"
    )
    return differs(MICRO, "micro-batches of a step", cause, step=0, expected=mine * len(ranks), found=result.micro)


def _gradients(
    ranks: Ranks, one: ScriptRecord, record: Record, replay: Record, coarser: float, result: Replayed
) -> Finding:
    apart, first = list[float](), 0.0
    for number in range(len(one.steps)):
        of, mine = StepGradients.read(record, ranks, number), _before_clipping(replay, number)
        if not of.names:
            continue
        if broken := of.not_finite():
            return not_replayed(f"the gradient of {broken[1]} holds NaN or an infinity at step {number}")
        scale = _scale_of(ranks[0], number) / _scale_of(one, number)
        mine = {name: array * scale for name, array in mine.items()}
        if missing := [name for name in of.names if name not in mine]:
            return not_replayed(f"in one process {missing[0]} has no gradient")
        ranked = of.reduced[0]
        whole = math.sqrt(sum(norm(ranked[name]) ** 2 for name in of.names))
        # Rounding is relative to what was added up, before anything cancels; of the whole gradient's size at most.
        sizes = {name: max(_added_up(of, name), 1e-3 * whole) for name in of.names}
        off = {name: norm(ranked[name] - mine[name]) / sizes[name] for name in of.names}
        name = max(off, key=lambda each: off[each])
        inside = ranks[0].steps[number].calls > 1  # the last call of a closure, at weights inside of the step
        bound = (LATER if number or inside else FIRST) * coarser
        first = off[name] if not apart else first
        apart.append(math.sqrt(sum(norm(ranked[n] - mine[n]) ** 2 for n in of.names)) / (whole or 1.0) / coarser)
        if inside and off[name] > bound:
            return Finding(GRADIENT, "unknown", INSIDE.format(number, off[name], name, ranks[0].steps[number].calls))
        if of.is_compressed and off[name] > bound:
            return Finding(GRADIENT, "unknown", HOOKED.format(number))
        if not math.isfinite(off[name]):
            return Finding(GRADIENT, "unknown", f"the gradient of {name} at step {number} is NaN or infinite")
        if drifts(apart) and off[name] > bound:
            values = ", ".join(f"{each:.0e}" for each in apart[-4:])
            return Finding(GRADIENT, "unknown", DRIFTS.format(many(number, "step"), values))
        if off[name] > bound:
            shown = {"expected": _figure(mine[name]), "found": _figure(ranked[name]), "tensor": name}
            comes_apart = any(each > FIRST for each in apart[1:-1])  # steps ago, and within the bound until now
            both = _of(of.names, ranked), _of(of.names, mine)
            cause = STEPS_APART if comes_apart else _cause(ranks, number, *both, result.feed)
            return differs(GRADIENT, "gradient against one process", cause, step=number, **shown)
        if finding := _clipped(of, replay, number, bound):
            return finding
    means = ", and each rank's mean loss was averaged, as the model computes it itself" if result.means else ""
    return Finding(
        GRADIENT,
        "right",
        f"that of one process, to {first:.0e} at the first step; fed: {HOW[result.feed]}{means}",
    )


def drifts(apart: Sequence[float]) -> bool:
    """Whether gradients that were the same come apart as rounding does in a training that doubles it many times a step.

    A mistake is there at once: it is no small multiple of what was there in the step before.
    """
    begins = [max(each, ROUNDING) for each in apart]
    return len(apart) > 2 and apart[0] <= 10 * ROUNDING and all(b <= GROWS * a for a, b in pairwise(begins))


def _clipped(of: StepGradients, replay: Record, step: int, bound: float) -> Finding | None:
    """Returns what is wrong where gradients that were the same are not, after what the script does to them."""
    theirs, mine = of.taken[0], of_kind(replay.arrays(STEP.format(step)), TAKEN)
    whole = math.sqrt(sum(norm(mine[name]) ** 2 for name in of.names))
    off = {name: norm(theirs[name] - mine[name]) for name in of.names}
    name = max(off, key=lambda each: off[each])
    if not of.clipped or off[name] <= bound * whole:
        return None
    cause = "clipping depends on the number of ranks: the same gradient is clipped to another norm in one process"
    shown = {"expected": _figure(mine[name]), "found": _figure(theirs[name]), "tensor": name}
    return differs(GRADIENT, "clipped gradient against one process", cause, step=step, **shown)


def _before_clipping(replay: Record, step: int) -> dict[str, NDArray[np.float64]]:
    arrays = replay.arrays(STEP.format(step))
    return of_kind(arrays, TAKEN) | of_kind(arrays, UNCLIPPED)


def _of(names: Sequence[str], gradients: Mapping[str, Array]) -> list[Array]:
    return [gradients[name] for name in names]


def _scale_of(rank: ScriptRecord, step: int) -> float:
    return rank.steps[step].scale or 1.0


def _added_up(of: StepGradients, name: str) -> float:
    return sum(norm(part) for each in of.local for part in each[name]) * abs(of.factor)


def _figure(array: Array) -> str:
    return f"a norm of {norm(array):.6g}"


def _cause(ranks: Ranks, step: int, of_ranks: Sequence[Array], of_one: Sequence[Array], feed: str) -> str:
    """Returns why the ranks' gradient is not that of one process."""
    theirs, mine = np.concatenate(of_ranks), np.concatenate(of_one)
    square = float(mine @ mine)
    factor = float(theirs @ mine) / square if square else 0.0
    size = len(ranks)
    if factor and norm(theirs - factor * mine) <= NEAR * norm(theirs):
        if feed == "in turn" and abs(factor * size - 1) <= NEAR:
            return NOT_DIVIDED.format(size)
        if abs(factor * size - 1) <= NEAR or abs(factor / size - 1) <= NEAR:
            times = "" if factor > 1 else "1/"
            return (
                f"the ranks' gradient is {times}{size} times that of one process on the same rows: the loss is scaled "
                "by the number of ranks or of local rows, or summed over a rank's rows"
            )
        return f"the ranks' gradient is {factor:.6g} times that of one process on the same rows: the loss is scaled"
    if _even(ranks, step):
        return THEN_APART if step else OTHER_LOSS
    rows = [sum(len(micro.rows) for micro in rank.steps[step].micro) for rank in ranks]
    if len(set(rows)) > 1:
        return f"{MEAN_OF_MEANS} (rows of the ranks at this step: {', '.join(map(str, rows))})"
    return (
        f"{MEAN_OF_MEANS}; or, where each has as many, a term of the loss depends on the rank or on the number of ranks"
    )


def _even(ranks: Ranks, step: int) -> bool:
    """Whether the losses of all ranks are known to be of as many rows and targets in each micro-batch of a step. A sum
    may be divided by other numbers than it counts, those of tokens that a mask leaves: it needs the same weights."""
    counts = [[(len(m.rows), *(term.count for term in m.losses)) for m in rank.steps[step].micro] for rank in ranks]
    weights = [
        [term.weight for m in rank.steps[step].micro for term in m.losses if term.reduction == "sum"] for rank in ranks
    ]
    even = all(of == counts[0] for of in counts) and all(len(of) > 1 and all(of) for of in counts[0])
    return even and all(of == weights[0] for of in weights)


def _rates(result: Replayed, ranks: Ranks, one: ScriptRecord) -> Finding:
    size, accelerated = len(ranks), "accelerate" in ranks[0].libraries
    recorded, mine = [step.rates for step in ranks[0].steps], [step.rates for step in one.steps]
    step = next((i for i, pair in enumerate(zip(recorded, mine)) if not _same(*pair)), None)
    if step is None:
        return Finding(RATE, "right", "that of one process at each step")
    base = result.recorded_base_rates, result.base_rates
    number = ranks[0].steps[step].optimizer
    of = [each for each in ranks[0].steps if each.optimizer == number]
    at = step if all(len(each) == len(ranks[0].steps) for each in base) else 0
    if any(each.schedules for each in of) and all(base):
        is_base = not _same(base[0][at], base[1][at])
    else:
        is_base = all(each.rates == of[0].rates for each in of)
    if is_base:
        theirs, own = recorded[step][0], mine[step][0]
        cause = (
            f"the learning rate depends on the number of ranks: {theirs:.6g} on {size}, {own:.6g} on one. Where that "
            "is on purpose (a rate that grows with the batch), the ranks do not train as one process does"
        )
        return differs(RATE, "learning rate", cause, step=step, rank=0, expected=mine[step], found=recorded[step])
    why = "its length is counted in batches of a rank, or in samples over ranks"
    if accelerated:
        why = "Accelerate advances its prepared schedules once for each process"
    values = f"{recorded[step][0]:.6g} at step {step}, where one process has {mine[step][0]:.6g}"
    return Finding(RATE, "unknown", f"the schedule depends on the number of ranks: {values}; {why}")


def _same(first: Sequence[float], second: Sequence[float]) -> bool:
    return len(first) == len(second) and all(math.isclose(*pair, rel_tol=1e-6) for pair in zip(first, second))


def _weights(result: Replayed, steps: int, coarser: float) -> Finding:
    moved = sum(each.moved for each in result.distances.values())
    off = sum(each.off for each in result.distances.values())
    if not moved:
        return Finding(WEIGHT, "unknown", "no weight moves")
    if not math.isfinite(moved):
        return Finding(WEIGHT, "unknown", "the ranks' weights hold NaN or an infinity")
    apart, bound = math.sqrt(off / moved), WEIGHTS * coarser
    if not apart <= bound:
        name = max(result.distances, key=lambda each: result.distances[each].off)
        cause = f"from the same weights, rows and rates one process ends elsewhere: {THE_STEP}"
        shown = {"expected": f"at most {bound:g} of the movement", "found": round(apart, 6), "tensor": name}
        return differs(WEIGHT, "weights against one process", cause, step=steps - 1, **shown)
    return Finding(
        WEIGHT, "right", f"after {many(steps, 'step')} those of one process, to {apart:.0e} of their movement"
    )
