"""Which parameter of one recording is which of another, where a change has given them other names.

A parameter is known by its first weights. Those that begin alike, as all biases do that begin at zero, are told apart
by the gradient that the first step takes; what is then left keeps its name, or its place among the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from samestep.proof.script.findings import Ranks
from samestep.proof.script.step_gradients import Array, norm
from samestep.records.script import ScriptRecord, StepRecord

Names = Mapping[str, str]  # a name in the second recording -> the parameter's name in the first
CLOSE = 1e-4  # of first gradients, relative
FROZEN = " (frozen)"


def matched(
    first: Mapping[str, int],
    second: Mapping[str, int],
    first_gradients: Mapping[str, Array],
    second_gradients: Mapping[str, Array],
) -> dict[str, str]:
    """Returns the name in the second recording -> the name in the first, of the parameters that both have.

    first, second: the digests of the first weights. The gradients are those of the first step. Parameters whose weights
    are in one recording alone keep their names, as they begin otherwise; or are matched in turn, where as many are left
    on both sides and one of them has the other's gradient's shape.
    """
    names: dict[str, str] = {}
    for digest in dict.fromkeys(second.values()):
        first_names = [name for name, other in first.items() if other == digest]
        second_names = [name for name, other in second.items() if other == digest]
        names |= _among(first_names, second_names, first_gradients, second_gradients)
    left = [name for name in first if name not in {*names.values()}]
    others = [name for name in second if name not in names]
    names |= {name: name for name in others if name in left}
    left = [name for name in left if name not in names.values()]
    others = [name for name in others if name not in names]
    sizes = [_sizes(first_gradients, left), _sizes(second_gradients, others)]
    if sizes[0] == sizes[1] and None not in sizes[0]:
        names |= dict(zip(others, left))
    # A parameter that the second has alone must not take a name that stands for another one.
    alone = [name for name in second if name not in names and name in names.values()]
    return names | {name: f"{name} (second)" for name in alone}


def _sizes(gradients: Mapping[str, Array], names: Sequence[str]) -> list[int | None]:
    return [gradients[name].size if name in gradients else None for name in names]


def _among(
    first_names: list[str],
    second_names: list[str],
    first_gradients: Mapping[str, Array],
    second_gradients: Mapping[str, Array],
) -> dict[str, str]:
    """Matches parameters that begin with the same weights, by their names in the first and the second recording."""

    def same_bits(name: str, other: str) -> bool:
        first, second = first_gradients.get(name), second_gradients.get(other)
        return first is not None and second is not None and np.array_equal(first, second)

    def close(name: str, other: str) -> bool:
        first, second = first_gradients.get(name), second_gradients.get(other)
        if first is None or second is None or first.shape != second.shape or not norm(first):
            return False
        return norm(first - second) <= CLOSE * norm(first)

    def same_name(name: str, other: str) -> bool:
        return name == other

    def both_frozen(name: str, other: str) -> bool:
        return is_frozen(name) == is_frozen(other)

    tests: list[Callable[[str, str], bool]] = [
        lambda name, other: same_name(name, other) and same_bits(name, other),
        same_bits,
        lambda name, other: same_name(name, other) and close(name, other),
        close,
        same_name,
        both_frozen,
        lambda name, other: True,
    ]
    names: dict[str, str] = {}
    for test in tests:
        for other in [name for name in second_names if name not in names]:
            taken = {*names.values()}
            if found := next((name for name in first_names if name not in taken and test(name, other)), None):
                names[other] = found
    return names


def is_frozen(name: str) -> bool:
    """Whether it is the name of a parameter that is not trained, as records have it."""
    return FROZEN in name


def renamed(ranks: Ranks, names: Names) -> list[ScriptRecord]:
    """Returns the second recording with the first one's names; what the first does not have keeps its own."""
    return [
        replace(
            rank,
            start=_keys(rank.start, names),
            steps=[_step(step, names) for step in rank.steps],
            ties=[(names.get(embedding, embedding), names.get(head, head)) for embedding, head in rank.ties],
        )
        for rank in ranks
    ]


def with_names(arrays: Mapping[str, Array], names: Names) -> dict[str, Array]:
    """Returns the arrays of a step's parameters with the first recording's names."""
    return {names.get(name, name): array for name, array in arrays.items()}


def _keys(values: Mapping[str, int], names: Names) -> dict[str, int]:
    return {names.get(name, name): value for name, value in values.items()}


def _words(held: Sequence[str], names: Names) -> list[str]:
    return [names.get(name, name) for name in held]


def _step(step: StepRecord, names: Names) -> StepRecord:
    return replace(
        step,
        weights=_keys(step.weights, names),
        moved=_words(step.moved, names),
        shards=_words(step.shards, names),
        held=_words(step.held, names),
        lost=_words(step.lost, names),
        uncleared=_words(step.uncleared, names),
        settings=[replace(group, parameters=_words(group.parameters, names)) for group in step.settings],
    )
