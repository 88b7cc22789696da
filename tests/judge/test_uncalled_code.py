"""Conditions that cannot hold, and moving averages whose function is never called."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from judge.test_frozen_weights import NAME, together
from samestep.judge.source import Source
from samestep.judge.uncalled_code import uncalled_code

UPDATE = """def soft_update(target, net):
    for t, s in zip(target.parameters(), net.parameters()):
        t.data.copy_(0.1 * s.data + 0.9 * t.data)
"""


@pytest.mark.parametrize(
    ("condition", "found"),
    [
        ("step % args.every == args.every", True),
        ("i > 3 and i % 4 == 4", True),
        ("step % args.every == 0", False),
        ("step % every == every - 1", False),
        ("i % 4 == 3", False),
        ("i > 3 or i % 4 == 4", False),
    ],
)
def test_a_condition_that_cannot_hold_is_named(condition: str, found: bool, tmp_path: Path) -> None:
    source = Source(f"{UPDATE}for step in steps:\n    if {condition}:\n        soft_update(target, net)\n")
    findings = uncalled_code(together(tmp_path, [2] * 4, [2] * 4), {"train.py": source})
    assert [(f.question, f.message.id, f.sites[0].line) for f in findings] == [
        ("frozen weights", "condition_never_holds", 5)
    ] * found


@pytest.mark.parametrize(
    ("calls", "moves", "said"),
    [("", False, ["average_never_updated"]), ("soft_update(target, net)\n", False, []), ("", True, [])],
)
def test_an_average_whose_function_is_never_called_is_warned_of(
    calls: str, moves: bool, said: list[str], tmp_path: Path
) -> None:
    digests = [2, 3, 4, 5] if moves else [1] * 4
    ranks = []
    for rank in together(tmp_path, digests, digests):
        start = {**rank.start, next(iter(rank.steps[0].weights)): 1}
        ranks.append(replace(rank, start=start, untrained={NAME: replace(rank.untrained[NAME], network="target")}))
    findings = uncalled_code(ranks, {"train.py": Source(UPDATE + calls)})
    assert [finding.message.id for finding in findings] == said
