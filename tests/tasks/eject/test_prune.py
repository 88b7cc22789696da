"""What is left of a script's text computes what the whole text did."""

from __future__ import annotations

import itertools
import random

import pytest

from samestep.tasks.eject.prune import Known, pruned

KNOWN = {"job.phases": (), "job.clip_norm": None, "job.every": "epoch", "world.size": 2}
UNKNOWN = ("first", "second", "third")


class _Fields:
    phases, clip_norm, every = (), None, "epoch"


class _World:
    size = 2


def expression(draw: random.Random, depth: int) -> str:
    """An expression of what is known and what is not, with parentheses wherever one might be forgotten."""
    if depth == 0:
        leaves = ["job.phases", "job.clip_norm", 'job.every == "epoch"', "world.size > 1", *UNKNOWN, "first < second"]
        return draw.choice(leaves)
    parts = [expression(draw, depth - 1) for _ in range(draw.choice((1, 2, 2, 3)))]
    match draw.randrange(4):
        case 0:
            return f"not ({parts[0]})"
        case 1:
            return f"(({parts[0]}) if ({parts[-1]}) else ({parts[0]}))"
        case 2:
            return " and ".join(f"({part})" for part in parts)
        case _:
            return " or ".join(f"({part})" for part in parts)


@pytest.mark.parametrize("seed", range(8))
def test_a_condition_is_true_where_it_was(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(20):
        condition = expression(draw, 3)
        text = f"def does(job, world, first, second, third):\n    if {condition}:\n        return 1\n    return 2\n"
        short = pruned(text, Known(values=KNOWN))
        whole_names: dict[str, object] = {}
        short_names: dict[str, object] = {}
        exec(text, whole_names)
        exec(short, short_names)
        for values in itertools.product((0, 1), repeat=3):
            arguments = (_Fields, _World, *values)
            assert short_names["does"](*arguments) == whole_names["does"](*arguments), (text, short)  # type: ignore[operator]


def test_nothing_stands_after_what_ends_a_block() -> None:
    text = "def rows(job):\n    if not job.phases:\n        return 1\n    order = 2\n    return order\n"
    assert pruned(text, Known(values=KNOWN)) == "def rows(job):\n    return 1\n"


def test_a_function_that_yields_still_does() -> None:
    text = "def rows(job):\n    if not job.phases:\n        return\n    yield 2\n"
    names: dict[str, object] = {}
    exec(pruned(text, Known(values=KNOWN)), names)
    assert list(names["rows"](None)) == []  # type: ignore[operator]
