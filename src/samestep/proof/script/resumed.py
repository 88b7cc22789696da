"""Names what a resumed run has lost, where it parts from the run that was not interrupted."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from samestep.proof.script.rows import trained
from samestep.proof.script.updates import Ranks, common_steps
from samestep.records.script import ScriptRecord

GRADIENT = (
    "from the checkpoint's weights and the same rows another gradient: random numbers (dropout), or another state of "
    "the model or the loss, are not restored"
)
OPTIMIZER = (
    "from the checkpoint's weights, the same gradient and rate the first step ends elsewhere: the optimizer's state "
    "(Adam's moments, a momentum, its count of steps) is not restored, or it has other settings"
)


def weights_before(rank: ScriptRecord, step: int) -> Mapping[str, int]:
    """Returns the digest of each weight before a step; of those that the optimizer does not hold, the first one."""
    return {**rank.start, **rank.steps[step - 1].weights} if step else rank.start


def weights_cause(one: ScriptRecord, other: ScriptRecord, since: int, wrong: Sequence[str]) -> str:
    """Returns why a resumed run begins with other weights. wrong: the names of these."""
    for step in range(len(one.steps) + 1):
        at = weights_before(one, step)
        if all(at.get(name) == other.start[name] for name in wrong):
            if not step:
                return "the training began anew: these are its first weights, and no checkpoint was loaded"
            return f"the weights are those after step {step - 1}, not {since - 1}: another checkpoint or --resumed-at"
    return (
        f"{len(wrong)} of {len(one.start)} parameters are not those after {since} steps: not saved or not loaded, "
        "rounded, or the number of steps is not the checkpoint's"
    )


def rows_of(ranks: Ranks, step: int) -> list[list[str]]:
    """Returns the digests of the rows that each rank trains in a step."""
    return [[row for micro in rank.steps[step].micro for row in micro.rows] for rank in ranks]


def _counted(of: Sequence[Sequence[str]]) -> Counter[str]:
    return Counter(row for rank in of for row in rank)


def rows_cause(one: Ranks, step: int, read: Sequence[Sequence[str]]) -> str:
    """Returns why a resumed run reads other rows than the uninterrupted run in its step. read: of each rank."""
    wanted = _counted(read)
    same = [each for each in common_steps(one) if _counted(rows_of(one, each)) == wanted]
    if not wanted or not same:
        return (
            "rows that the first run does not train together in any recorded step: the epoch's order, which its seed, "
            "epoch or random state decides, is not restored"
        )
    epochs = {each: _epoch(one[0], each) for each in common_steps(one)}
    epoch = epochs[step]
    for other, what in ((step - 1, "trained again"), (step + 1, "read too early: a batch is left out")):
        if other in same:
            return f"off by one batch: the rows of step {other}, {what}"
    begins = next(each for each in epochs if epochs[each] == epoch)
    if epoch is not None and begins in same:
        return f"epoch {epoch} begins anew: its batches before the checkpoint are not skipped"
    of = epochs[same[0]]
    if None not in (of, epoch) and of != epoch:
        return (
            f"the rows of step {same[0]}: the order of epoch {of} in place of that of epoch {epoch}: the sampler's "
            "epoch or random state is not restored"
        )
    return f"the rows of step {same[0]} of the first run: the place in the data is not restored"


def _epoch(rank: ScriptRecord, step: int) -> int | None:
    """Returns the number of the pass over the loader from which a step has its rows; None where there is none."""
    of = {id(each): number for number, each in enumerate(trained(rank))}
    passes = [number for micro in rank.steps[step].micro for number in micro.passes]
    return of.get(id(rank.passes[passes[0]])) if passes else None


def same_rates(first: Sequence[float], second: Sequence[float]) -> bool:
    """Whether two steps are taken at the same rates."""
    return len(first) == len(second) and all(math.isclose(*pair, rel_tol=1e-6) for pair in zip(first, second))


def rate_cause(one: ScriptRecord, step: int, resumed_rates: Sequence[float]) -> str:
    """Returns why a resumed run has other rates than the uninterrupted run in its step."""
    rates = [each.rates for each in one.steps]
    if step + 1 < len(rates) and same_rates(rates[step + 1], resumed_rates):
        return "the schedule is one step ahead: it is advanced once more when it is loaded"
    if same_rates(rates[step - 1], resumed_rates):
        return "the schedule is one step behind, or its rate is not set after loading"
    if same_rates(rates[0], resumed_rates):
        return "the rate begins anew: the schedule's state, or that of the optimizer's groups, is not restored"
    return "the schedule's state, or what it counts (the total of steps), is not restored"
