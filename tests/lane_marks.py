"""Which cases of a product `make check` runs, in turn, and which are left to `make full`.

A product of engines x jobs, of faults x scripts, … has hundreds of cases, most of which repeat what another has shown.
`make check` runs some of each, always the same ones, and `make full` the rest: docs/decisions/022-three-lanes.md.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
CHECK, FULL = pytest.mark.check, pytest.mark.full


def in_turn(of: int, *numbers: int) -> pytest.MarkDecorator:
    """The mark of a case with these numbers in the lists whose product it is: `make check` runs one case of `of`.

    Of two lists, neither of them shorter than `of`, it is a Latin square: some of each row and of each column.
    """
    return FULL if sum(numbers) % of else CHECK


def shared_out(names: Sequence[str], values: Sequence[T], of: int) -> list[Any]:
    """For each name two cases: with every `of`-th value, which are others for the next name, and with all other ones.
    The parameters are (name, values)."""
    assert of <= min(len(names), len(values)), "some values would be in no lane but make full"
    cases = []
    for number, name in enumerate(names):
        chosen = [value for index, value in enumerate(values) if in_turn(of, number, index) is CHECK]
        cases.append(pytest.param(name, chosen, marks=CHECK, id=name))
        cases.append(pytest.param(name, [v for v in values if v not in chosen], marks=FULL, id=f"{name}, the others"))
    return cases


def first_of_each(cases: Sequence[T], *keys: Callable[[T], object]) -> list[T]:
    """Those cases that are the first with a value of one of these keys."""
    seen: set[tuple[int, object]] = set()
    chosen = []
    for case in cases:
        values = {(number, key(case)) for number, key in enumerate(keys)}
        if values - seen:
            chosen.append(case)
        seen |= values
    return chosen


def on_engines(
    names: Sequence[str],
    engines: Sequence[str],
    sizes_of: Callable[[str], Sequence[int]],
    quick: Collection[tuple[Any, ...]],
) -> list[Any]:
    """Each job on each engine at its numbers of ranks, a sixth in `make check`, and `quick` in `make test`, too.
    The parameters are (name, engine, size)."""
    return [
        pytest.param(name, engine, size, marks=() if (name, engine, size) in quick else in_turn(6, column, row))
        for column, name in enumerate(names)
        for row, engine in enumerate(engines)
        for size in sizes_of(engine)
    ]
