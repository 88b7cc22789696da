"""Makes the findings of the ranks of a script."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from samestep.message import Message, message
from samestep.records.findings import Finding, Question
from samestep.records.results import Divergence
from samestep.records.script import ScriptRecord

Ranks = Sequence[ScriptRecord]


def differs(
    question: Question,
    quantity: str,
    cause: Message,
    *,
    expected: Any,
    found: Any,
    step: int | None = None,
    tensor: str | None = None,
    rank: int | None = None,
) -> Finding:
    """Returns a finding that differs, with its divergence."""
    divergence = Divergence(
        training="script",
        step=step,
        quantity=quantity,
        tensor=tensor,
        rank=rank,
        expected=expected,
        found=found,
        cause=cause,
    )
    return Finding(question, "differs", cause, divergence)


def common_steps(ranks: Ranks) -> range:
    """Returns the numbers of the steps that all ranks have recorded."""
    return range(min(len(rank.steps) for rank in ranks))


def first_apart(steps: Mapping[int, set[int]]) -> int | None:
    """Returns the first step at which some ranks do what others do not, of those that do it at all; None where they do
    it at the same steps. steps: rank -> those before which it does it."""
    all_steps = set[int]().union(*steps.values())
    return min((step for step in all_steps if not all(step in of_rank for of_rank in steps.values())), default=None)


def rank_apart(values: Sequence[Any]) -> int:
    """Returns the rank that differs from the most common value; of two, rank 1."""
    texts = [repr(value) for value in values]
    # Of equally common values the first one counts.
    ((common, _),) = Counter(texts).most_common(1)
    return next(rank for rank, text in enumerate(texts) if text != common)


def digest(value: int) -> str:
    """Returns the first digits of a digest, to be shown."""
    return f"{value:x}"[:8]


def module_name(module: str) -> str | Message:
    """Returns how a module is called: by its name, which the whole model has not."""
    return module or message("the_model_itself")
