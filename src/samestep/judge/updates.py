"""Judges whether the ranks begin alike, stay alike, and take as many steps at the same rate."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from samestep.bounds import NO_GRADIENT
from samestep.judge.copies import Copies, copies_apart
from samestep.judge.findings import Ranks, common_steps, differs, rank_apart
from samestep.message import Message, message
from samestep.records.findings import Finding, Question
from samestep.records.record import Record
from samestep.records.script import STEP, TAKEN, ClosureRecord, ScriptRecord, of_kind
from samestep.records.script_plan import ScriptPlan

FROZEN = "{} (frozen)"  # the name of a parameter that a model holds and does not train
NOT_KNOWN: Mapping[int, Message | None] = {}
SIXTEEN_BITS = {"bfloat16", "float16"}


def step_counts(plan: ScriptPlan, ranks: Ranks) -> Finding:
    """Judges whether all ranks take as many optimizer steps, and call a closure as often in each."""
    closures = [ClosureRecord([step.calls for step in rank.steps], len(rank.steps)) for rank in ranks]
    if (step := unequal_calls(closures)) is not None:
        calls = {rank: record.calls[step] for rank, record in enumerate(closures) if step < len(record.calls)}
        return differs(
            "steps",
            "calls of the closure",
            why_unequal_calls(closures, step),
            step=step,
            rank=[*calls][rank_apart([*calls.values()])],
            expected=message("as_many_on_all_ranks"),
            found=[*calls.values()],
        )
    counts = [len(rank.steps) for rank in ranks]
    if len(set(counts)) > 1:
        rank = counts.index(min(counts))
        cause = message("ranks_take_different_steps", rank=rank)
        return differs("steps", "optimizer steps", cause, rank=rank, expected=max(counts), found=min(counts))
    if not counts[0]:
        return Finding("steps", "unknown", message("no_training_step"))
    asked = plan.steps if counts[0] < plan.steps else None
    return Finding("steps", "right", message("steps_on_each_rank", steps=counts[0], asked=asked))


def unequal_calls(ranks: Sequence[ClosureRecord]) -> int | None:
    """Returns the first step in which ranks call the closure different numbers of times; None where they do not.

    Of a step that a rank has not ended, the number may still grow.
    """
    for step in range(max((len(rank.calls) for rank in ranks), default=0)):
        reached = [(rank.calls[step], step < rank.done) for rank in ranks if step < len(rank.calls)]
        ended = [calls for calls, done in reached if done]
        if ended and (len({*ended}) > 1 or max(calls for calls, _ in reached) > ended[0]):
            return step
    return None


def why_unequal_calls(ranks: Sequence[ClosureRecord], step: int) -> Message:
    """Returns the usual cause of unequal calls of a closure at a step."""
    calls = [
        message("calls_on_rank", calls=closures.calls[step], rank=rank)
        if step < closures.done
        else message("calls_or_more_on_rank", calls=closures.calls[step], rank=rank)
        for rank, closures in enumerate(ranks)
        if step < len(closures.calls)
    ]
    return message("closure_called_unequally", step=step, calls=calls)


def left_behind(steps: Sequence[int], ended: Collection[int]) -> Message | None:
    """Returns why ranks that failed have lost those that had ended their recorded steps; None where that is not why.

    steps: how many each rank has taken. ended: the ranks that have taken all that were asked.
    """
    most = max((steps[rank] for rank in ended), default=0)
    behind = [rank for rank, taken in enumerate(steps) if rank not in ended and taken < most]
    if not behind:
        return None
    first = min(ended)
    took = [message("rank_took_only", rank=rank, steps=steps[rank]) for rank in behind]
    return message("ranks_left_behind", rank=first, steps=steps[first], behind=took)


def ended_apart(
    steps: Sequence[int], ended_itself: Collection[int], left: Mapping[int, Message | None] = NOT_KNOWN
) -> Message | None:
    """Returns why ranks that failed have lost those whose script had come to its end; None where that is not why.

    steps: how many each rank has taken. ended_itself: the ranks whose script has ended before all steps were recorded.
    left: by which line, and after which exception that the script had caught.
    """
    other_ranks = [rank for rank in range(len(steps)) if rank not in ended_itself]
    if not ended_itself or not other_ranks:
        return None
    rank = min(ended_itself, key=lambda ended: steps[ended])
    went_on = [other_rank for other_rank in other_ranks if steps[other_rank] >= steps[rank]]
    if not went_on:
        return None
    how = left.get(rank)
    if how and how.fields.get("caught"):
        return message("rank_leaves_after_exception", rank=rank, steps=steps[rank], others=went_on, how=how)
    return message("ranks_end_at_different_steps", rank=rank, steps=steps[rank], others=went_on)


def initial_weights(ranks: Ranks) -> Finding:
    """Judges whether all ranks begin with the same weights."""
    question: Question = "initial weights"
    names, shards = list(ranks[0].start), ranks[0].steps[0].shards
    if ranks[0].steps[0].sharded:
        return Finding(question, "unknown", message("sharding_not_judged"))
    if shards and not names:
        return Finding(question, "right", message("elements_on_one_rank_each", parameters=len(shards)))
    if finding := _frozen_on_some(ranks):
        return finding
    trained = set().union(*(step.weights for rank in ranks for step in rank.steps))
    if any(trained.intersection(rank.start) != trained.intersection(names) for rank in ranks):
        return Finding(question, "unknown", message("ranks_hold_other_parameters"))
    # A network that one rank alone holds and nobody trains, as an average that rank 0 keeps, is compared with none.
    names = [name for name in names if all(name in rank.start for rank in ranks)]
    apart = copies_apart(_copies(ranks, names), ranks, step=None)
    if apart is None:
        return Finding(question, "right", message("weights_start_the_same", parameters=len(names)))
    fields = {"different": apart.different, "parameters": len(names)}
    return apart.finding(message("ranks_begin_with_different_weights", **fields))


def _copies(ranks: Ranks, names: Iterable[str]) -> list[Copies]:
    """Returns the copies of parameters that all ranks hold."""
    return [Copies(name, [(number, name) for number in range(len(ranks))]) for name in names]


def _frozen_on_some(ranks: Ranks) -> Finding | None:
    """Finds parameters that some ranks train, and others hold frozen."""
    trained = dict.fromkeys(name for rank in ranks for name in rank.start)
    frozen = {
        name: [
            number for number, rank in enumerate(ranks) if name not in rank.start and FROZEN.format(name) in rank.start
        ]
        for name in trained
    }
    apart = [name for name, numbers in frozen.items() if numbers]
    if not apart:
        return None
    name, numbers = apart[0], frozen[apart[0]]
    cause = message("parameters_frozen_on_some_ranks", ranks=numbers, frozen=len(apart))
    return differs("initial weights", "requires_grad", cause, tensor=name, rank=numbers[0], expected=True, found=False)


def weights(ranks: Ranks) -> Finding:
    """Judges whether all ranks have the same weights after each step."""
    question: Question = "weights"
    if any(step.sharded for rank in ranks for step in rank.steps):
        return Finding(question, "unknown", message("sharding_not_judged"))
    for step in common_steps(ranks):
        names = ranks[0].steps[step].weights.keys()
        if any(rank.steps[step].weights.keys() != names for rank in ranks):
            return Finding(question, "unknown", message("ranks_hold_other_parameters"))
        if apart := copies_apart(_copies(ranks, names), ranks, step=step):
            fields = {"different": apart.different, "parameters": len(names)}
            return apart.finding(message("ranks_weights_drift_apart", **fields))
    shards = ranks[0].steps[0].shards
    if shards and not ranks[0].start:
        return Finding(question, "right", message("elements_on_one_rank_each", parameters=len(shards)))
    return Finding(question, "right", message("weights_stay_the_same", steps=len(common_steps(ranks))))


def updates(ranks: Ranks, record: Record) -> Finding:
    """Judges whether each parameter with a gradient is moved by some step."""
    question: Question = "updates"
    with_gradient = set[str]()
    moved = {name for rank in ranks for step in rank.steps for name in step.moved}
    for step in common_steps(ranks):
        if not any(rate > 0 for rate in ranks[0].steps[step].rates):
            continue
        holders = ranks if ranks[0].steps[step].shards else ranks[:1]
        taken = [of_kind(record.arrays(STEP.format(step), rank.rank), TAKEN) for rank in holders]
        sizes: dict[str, float] = {}
        for gradients in taken:
            for name, gradient in gradients.items():
                sizes[name] = max(sizes.get(name, 0.0), float(abs(gradient).max(initial=0.0)))
        with_gradient |= {name for name, size in sizes.items() if size > NO_GRADIENT * max(sizes.values())}
    held = {name for rank in ranks for step in rank.steps for name in step.held}
    lost = {name for rank in ranks for step in rank.steps for name in step.lost}
    if lost and not with_gradient and not moved:
        cause, nothing = message("gradients_never_reach_the_optimizer"), message("no_gradient")
        return differs(question, "update", cause, step=0, tensor=min(lost), expected=message("a_change"), found=nothing)
    # A parameter that the optimizer holds and does not move has a step below the weights' resolution.
    still = with_gradient - moved - held
    copied = any(step.foreign for rank in ranks for step in rank.steps)
    if still and held and not copied:
        fields = {"still": len(still), "with_gradient": len(with_gradient), "names": sorted(still)}
        return Finding(question, "warning", message("optimizer_without_some_parameters", **fields))
    if still and moved and SIXTEEN_BITS.intersection(ranks[0].steps[0].dtypes):
        return Finding(question, "unknown", message("updates_may_vanish_in_16_bits", parameter=min(still)))
    if still:
        cause = message("optimizer_of_a_copy", with_gradient=len(still))
        same = message("same_digest")
        return differs(question, "update", cause, step=0, tensor=min(still), expected=message("a_change"), found=same)
    frozen = sorted(name for name in ranks[0].start if name not in with_gradient and name not in moved)
    first, count = (frozen[0], len(frozen)) if frozen else (None, None)
    return Finding(question, "right", message("parameters_with_gradient_move", frozen=first, count=count))


def rates(ranks: Ranks) -> Finding:
    """Judges whether all ranks step at the same learning rates."""
    for step in common_steps(ranks):
        of_ranks = [rank.steps[step].rates for rank in ranks]
        if any(rate != of_ranks[0] for rate in of_ranks):
            rank = rank_apart(of_ranks)
            return differs(
                "rate",
                "learning rate",
                message("rates_differ_between_ranks"),
                step=step,
                rank=rank,
                expected=of_ranks[0],
                found=of_ranks[rank],
            )
    return Finding("rate", "right", message("rates_are_the_same"))


def schedule(ranks: Ranks) -> Finding:
    """Judges whether a schedule that moves with the steps is advanced once a step."""
    question: Question = "schedule"
    first = ranks[0]
    if not any(step.schedules for step in first.steps):
        return Finding(question, "right", message("no_schedule"))
    for step, advances in _advances(first):
        micro_batches = len(first.steps[step - 1].micro_batches)
        # A schedule that counts batches counts those, too, whose gradients were cleared without a step.
        if advances <= 1 + first.steps[step].cleared:
            continue
        if advances == len(ranks) and "accelerate" in first.libraries:
            return Finding(question, "unknown", message("schedule_advances_once_per_process", advances=advances))
        cause = message("schedule_advances_several_times")
        if advances == micro_batches:
            cause = message("schedule_advances_each_micro_batch")
        elif advances == len(ranks):
            cause = message("schedule_advances_once_per_rank")
        return differs(question, "advances of the schedule", cause, step=step, rank=0, expected=1, found=advances)
    total = sum(advances for _, advances in _advances(first))
    return Finding(question, "right", message("schedule_advances_once_a_step", advances=total, steps=len(first.steps)))


def _advances(rank: ScriptRecord) -> Iterator[tuple[int, int]]:
    """Yields (step, how far the schedules have moved since the optimizer's last step): the furthest of them."""
    before: dict[int, list[int]] = {}
    for number, step in enumerate(rank.steps):
        last = before.get(step.optimizer)
        if last and len(last) == len(step.schedules):
            yield number, max((now - past for now, past in zip(step.schedules, last)), default=0)
        before[step.optimizer] = step.schedules
