"""Whether the ranks begin alike, stay alike, and take their steps at the same rate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from samestep.message import as_said
from samestep.proof.script.closures import cause_of, unequal_calls
from samestep.records.record import Record
from samestep.records.results import Divergence
from samestep.records.script import STEP, TAKEN, ClosuresSeen, Finding, ScriptPlan, ScriptRecord, of_kind

Ranks = Sequence[ScriptRecord]
SHARDED = "some parameters are sharded in several dimensions, or over some of the ranks, which is not judged yet"
OTHERS = "each rank holds other parameters, as the stages of a pipeline do: they are not compared"
ROUNDING = 1e-6  # of the step's largest gradient: one below is rounding, as of a bias before BatchNorm
LOST = (
    "the ranks compute gradients, and none comes to the optimizer: they are never reduced (a flag that delays it is "
    "never set back), or the optimizer holds other tensors than the model"
)
ODD = "the weights of one rank are changed alone: by a step, a copy or an initialisation that the others do not make"


def differs(question: str, quantity: str, cause: str, **where: Any) -> Finding:
    """Returns a finding that differs. where: the other fields of its Divergence."""
    fields = {"training": "script", "step": None, "tensor": None, "rank": None} | where
    return Finding(question, "differs", cause, Divergence(quantity=quantity, cause=as_said(cause), **fields))


def common_steps(ranks: Ranks) -> range:
    """Returns the numbers of the steps that all ranks have recorded."""
    return range(min(len(rank.steps) for rank in ranks))


def many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def step_counts(plan: ScriptPlan, ranks: Ranks) -> Finding:
    called = [ClosuresSeen([step.calls for step in rank.steps], len(rank.steps)) for rank in ranks]
    if (step := unequal_calls(called)) is not None:
        of = {rank: each.calls[step] for rank, each in enumerate(called) if step < len(each.calls)}
        shown = {"rank": [*of][_odd([*of.values()])], "expected": "as many on all ranks", "found": [*of.values()]}
        return differs("steps", "calls of the closure", cause_of(called, step), step=step, **shown)
    counts = [len(rank.steps) for rank in ranks]
    if len(set(counts)) > 1:
        low = counts.index(min(counts))
        cause = (
            f"rank {low} takes fewer optimizer steps than the others: its loader has fewer batches, or a condition on "
            "its own data skips steps"
        )
        return differs("steps", "optimizer steps", cause, rank=low, expected=max(counts), found=min(counts))
    if not counts[0]:
        return Finding(
            "steps",
            "unknown",
            "the script ended without an optimizer step after a training forward pass on its ranks; does it train, or "
            "start processes of its own? It must run under torchrun",
        )
    short = f" of the {plan.steps} that were asked; the script ended itself" if counts[0] < plan.steps else ""
    return Finding("steps", "right", f"{many(counts[0], 'optimizer step')} on each rank{short}")


def initial_weights(ranks: Ranks) -> Finding:
    question = "initial weights"
    names, shards = list(ranks[0].start), ranks[0].steps[0].shards
    if ranks[0].steps[0].sharded:
        return Finding(question, "unknown", SHARDED)
    if shards and not names:
        return Finding(question, "right", f"{many(len(shards), 'parameter')}, each element on one rank alone")
    if len({frozenset(rank.start) for rank in ranks}) > 1:
        return Finding(question, "unknown", OTHERS)
    wrong = [name for name in names if len({rank.start.get(name) for rank in ranks}) > 1]
    if wrong:
        rank = _odd([each.start.get(wrong[0]) for each in ranks])
        cause = (
            f"the ranks begin with different weights ({len(wrong)} of {len(names)} parameters): they are initialised "
            "without a common seed, and nothing broadcasts rank 0's (DistributedDataParallel does)"
        )
        digests = [f"{rank.start.get(wrong[0], 0):x}"[:8] for rank in ranks]
        at = {"tensor": wrong[0], "rank": rank, "expected": "the same digest on all ranks", "found": digests}
        return differs(question, "initial weights", cause, **at)
    return Finding(question, "right", f"{many(len(names), 'parameter')}, the same on all ranks to the last bit")


def _odd(values: Sequence[Any]) -> int:
    """Returns the rank that differs from the most common value; of two, rank 1."""
    common = max(values, key=lambda value: (values.count(value), -values.index(value)))
    return next(rank for rank, value in enumerate(values) if value != common)


def weights(ranks: Ranks) -> Finding:
    question = "weights"
    if any(step.sharded for rank in ranks for step in rank.steps):
        return Finding(question, "unknown", SHARDED)
    for step in common_steps(ranks):
        of = [rank.steps[step].weights for rank in ranks]
        if len({frozenset(each) for each in of}) > 1:
            return Finding(question, "unknown", OTHERS)
        wrong = [name for name in of[0] if len({each.get(name) for each in of}) > 1]
        if wrong:
            rank = _odd([each.get(wrong[0]) for each in of])
            cause = f"the ranks' weights have drifted apart ({len(wrong)} of {len(of[0])} parameters): {ODD}"
            shown = {"expected": "the same digest on all ranks", "found": [f"{e.get(wrong[0], 0):x}"[:8] for e in of]}
            return differs(question, "weights after the step", cause, step=step, tensor=wrong[0], rank=rank, **shown)
    count, shards = len(common_steps(ranks)), ranks[0].steps[0].shards
    if shards and not ranks[0].start:
        return Finding(question, "right", f"each element of {many(len(shards), 'parameter')} is on one rank alone")
    return Finding(question, "right", f"the same on all ranks to the last bit after each of {many(count, 'step')}")


def updates(ranks: Ranks, record: Record) -> Finding:
    """Whether each parameter with a gradient is moved by some step."""
    question, still, seen = "updates", set[str](), set[str]()
    moved = {name for rank in ranks for step in rank.steps for name in step.moved}
    for number in common_steps(ranks):
        if not any(rate > 0 for rate in ranks[0].steps[number].rates):
            continue
        of = ranks if ranks[0].steps[number].shards else ranks[:1]
        taken = [of_kind(record.arrays(STEP.format(number), rank.rank), TAKEN) for rank in of]
        names = {name for each in taken for name in each}
        sizes = {n: max(float(abs(each[n]).max(initial=0.0)) for each in taken if n in each) for n in names}
        seen |= {name for name, size in sizes.items() if size > ROUNDING * max(sizes.values())}
    held = {name for rank in ranks for step in rank.steps for name in step.held}
    lost = {name for rank in ranks for step in rank.steps for name in step.lost}
    if lost and not seen and not moved:
        return differs(question, "update", LOST, step=0, tensor=min(lost), expected="a change", found="no gradient")
    still = seen - moved - held  # what it holds and does not move has a step below the weights' resolution
    if still and {*ranks[0].steps[0].dtypes} & {"bfloat16", "float16"}:
        return Finding(question, "unknown", f"{min(still)} never moves, as small updates do not in 16-bit weights")
    if still:
        cause = (
            f"{len(still)} of {len(seen)} parameters have a gradient, and no step moves them: the optimizer holds "
            "other tensors than the model, as where it was made before the model was wrapped or moved"
        )
        return differs(
            question, "update", cause, step=0, tensor=min(still), expected="a change", found="the same digest"
        )
    frozen = sorted(name for name in ranks[0].start if name not in seen and name not in moved)
    more = f"; {frozen[0]} and all without a gradient stay ({len(frozen)} in all)" if frozen else ""
    return Finding(question, "right", f"every parameter that has a gradient moves{more}")


def rates(ranks: Ranks) -> Finding:
    for step in common_steps(ranks):
        of = [rank.steps[step].rates for rank in ranks]
        if any(rate != of[0] for rate in of):
            cause = "the ranks step at different rates: a rate, or what advances a schedule, depends on the rank"
            rank = _odd(of)
            return differs("rate", "learning rate", cause, step=step, rank=rank, expected=of[0], found=of[rank])
    return Finding("rate", "right", "the same on all ranks at each step")


def schedule(ranks: Ranks) -> Finding:
    """Whether a schedule that moves with the steps is advanced once a step."""
    question, first = "schedule", ranks[0]
    if not any(step.schedules for step in first.steps):
        return Finding(question, "right", "no schedule of torch.optim.lr_scheduler")
    for step, advances in _advances(first):
        micro = len(first.steps[step - 1].micro)
        if advances <= 1:
            continue
        if advances == len(ranks) and "accelerate" in first.libraries:
            return Finding(
                question,
                "unknown",
                f"it advances {advances} times a step, once for each process, as Accelerate's prepared schedulers do: "
                "right only if its length was counted in one process's batches",
            )
        reason = "once a micro-batch, not once a step" if micro > 1 and advances == micro else "several times a step"
        if advances == len(ranks) and advances != micro:
            reason = "once for each rank: so its length depends on the number of ranks"
        cause = f"the schedule advances {reason}"
        return differs(question, "advances of the schedule", cause, step=step, rank=0, expected=1, found=advances)
    total = sum(advances for _, advances in _advances(first))
    return Finding(question, "right", f"advanced {many(total, 'time')} in {len(first.steps)} steps, never twice in one")


def _advances(rank: ScriptRecord) -> Iterator[tuple[int, int]]:
    """Yields (step, how far the schedules have moved since the optimizer's last step): the furthest of them."""
    before: dict[int, list[int]] = {}
    for number, step in enumerate(rank.steps):
        last = before.get(step.optimizer)
        if last and len(last) == len(step.schedules):
            yield number, max((now - then for now, then in zip(step.schedules, last)), default=0)
        before[step.optimizer] = step.schedules
