from __future__ import annotations

import ast

from samestep.judge.places import RATE_WRITES, called, decided_by_rank, flowing, written
from samestep.judge.source import RANK
from samestep.judge.source_search import calls
from samestep.judge.suggested_patches import Script, unwrap_test_of_rank
from samestep.rules import Rule


def on_all_ranks(script: Script) -> None:
    """Takes lines out of a condition on the rank, so that all ranks run them."""
    for statement in [*script.statements("scheduler step"), *script.shared()]:
        condition = statement if isinstance(statement, ast.If) else script.source.parent(statement)
        if unwrap_test_of_rank(script, condition):
            return


RULE = Rule(
    en="the ranks step at different learning rates: the rate, or the call that advances a schedule, depends on the rank",
    zh="各 rank 使用不同的学习率：学习率，或者推动调度器前进的条件，依赖于 rank",
    lines=(
        decided_by_rank(called("scheduler step")),
        flowing(called("optimizer"), RANK),
        decided_by_rank(written(lambda source: calls(source, "step"))),
        called("scheduler step"),
        RATE_WRITES,
        called("optimizer"),
    ),
    patch=on_all_ranks,
    broken="""
if rank == 0:
    scheduler.step()
""",
    right="""
scheduler.step()
""",
)
