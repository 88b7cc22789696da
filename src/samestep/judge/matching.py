"""Matches the parameters of two recordings, where a change has given them other names.

A parameter is known by its first weights. Those that begin alike, as all biases do that begin at zero, are told apart
by the gradient that the first step takes; those that are left are matched by their names, or by their places.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from samestep.bounds import MATCHED_APART
from samestep.judge.findings import Ranks
from samestep.judge.fit import Array, norm
from samestep.records.script import ScriptRecord, StepRecord

Names = Mapping[str, str]  # a name in the second recording -> the parameter's name in the first
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
        first_names = [name for name, known_digest in first.items() if known_digest == digest]
        second_names = [name for name, known_digest in second.items() if known_digest == digest]
        names |= _among(first_names, second_names, first_gradients, second_gradients)
    left = [name for name in first if name not in {*names.values()}]
    remaining = [name for name in second if name not in names]
    names |= {name: name for name in remaining if name in left}
    left = [name for name in left if name not in names.values()]
    remaining = [name for name in remaining if name not in names]
    sizes = [_sizes(first_gradients, left), _sizes(second_gradients, remaining)]
    if sizes[0] == sizes[1] and None not in sizes[0]:
        names |= dict(zip(remaining, left))
    # A parameter of the second recording alone must not take the name of another parameter.
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

    def same_bits(name: str, second_name: str) -> bool:
        first, second = first_gradients.get(name), second_gradients.get(second_name)
        return first is not None and second is not None and np.array_equal(first, second)

    def close(name: str, second_name: str) -> bool:
        first, second = first_gradients.get(name), second_gradients.get(second_name)
        if first is None or second is None or first.shape != second.shape or not norm(first):
            return False
        return norm(first - second) <= MATCHED_APART * norm(first)

    def same_name(name: str, second_name: str) -> bool:
        return name == second_name

    def both_frozen(name: str, second_name: str) -> bool:
        return is_frozen(name) == is_frozen(second_name)

    tests: list[Callable[[str, str], bool]] = [
        lambda name, second_name: same_name(name, second_name) and same_bits(name, second_name),
        same_bits,
        lambda name, second_name: same_name(name, second_name) and close(name, second_name),
        close,
        same_name,
        both_frozen,
        lambda name, second_name: True,
    ]
    names: dict[str, str] = {}
    for test in tests:
        for second_name in [name for name in second_names if name not in names]:
            taken = {*names.values()}
            if found := next((name for name in first_names if name not in taken and test(name, second_name)), None):
                names[second_name] = found
    return names


def is_frozen(name: str) -> bool:
    """Returns whether it is the name of a parameter that is not trained, as records have it."""
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
