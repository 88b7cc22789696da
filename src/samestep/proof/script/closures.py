"""Whether the ranks call an optimizer's closure equally often, as LBFGS decides by the loss that it returns."""

from __future__ import annotations

from collections.abc import Sequence

from samestep.records.script import ClosuresSeen

CAUSE = (
    "the ranks call the optimizer's closure different numbers of times at step {} ({}), as LBFGS and its line search "
    "do where each rank goes by its own loss: a gradient is then averaged with that of another call; return the mean "
    "over ranks from the closure (all_reduce the loss)"
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
