"""Whether the ranks step equally often, and call an optimizer's closure equally often, as LBFGS decides by its loss."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from samestep.records.script import ClosuresSeen

CAUSE = (
    "the ranks call the optimizer's closure different numbers of times at step {} ({}), as LBFGS and its line search "
    "do where each rank goes by its own loss: a gradient is then averaged with that of another call; return the mean "
    "over ranks from the closure (all_reduce the loss)"
)

BEHIND = (
    "rank {} had taken its {} optimizer steps, and {}, when a collective waited for the rank that had ended: the ranks "
    "do not step equally often (a condition on the rank skips steps, or its loader has fewer batches, as under Join)"
)


def unequal_calls(ranks: Sequence[ClosuresSeen]) -> int | None:
    """Returns the first step in which ranks call the closure different numbers of times; None where they do not.

    Of a step that a rank has not ended, the number may still grow.
    """
    for step in range(max((len(rank.calls) for rank in ranks), default=0)):
        reached = [(rank.calls[step], step < rank.done) for rank in ranks if step < len(rank.calls)]
        ended = [calls for calls, done in reached if done]
        if ended and (len({*ended}) > 1 or max(calls for calls, _ in reached) > ended[0]):
            return step
    return None


def cause_of(ranks: Sequence[ClosuresSeen], step: int) -> str:
    """Returns the usual cause of unequal calls at a step."""
    counts = [
        f"{rank.calls[step]}{'' if step < rank.done else ' or more'} on rank {number}"
        for number, rank in enumerate(ranks)
        if step < len(rank.calls)
    ]
    return CAUSE.format(step, ", ".join(counts))


def left_behind(steps: Sequence[int], ended: Collection[int]) -> str:
    """Returns why ranks that failed have lost those that had ended their recorded steps; '' where that is not why.

    steps: how many each rank has taken. ended: the ranks that have taken all that were asked.
    """
    most = max((steps[rank] for rank in ended), default=0)
    behind = [rank for rank, taken in enumerate(steps) if rank not in ended and taken < most]
    if not behind:
        return ""
    first = min(ended)
    return BEHIND.format(first, steps[first], ", ".join(f"rank {rank} only {steps[rank]}" for rank in behind))
