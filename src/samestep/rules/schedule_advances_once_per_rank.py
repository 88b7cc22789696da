from __future__ import annotations

import ast

from samestep.judge.edits import is_ranks
from samestep.judge.suggested_patches import Script
from samestep.rules import Rule


def advance_once(script: Script) -> None:
    """Advances the schedule once in place of a loop over the ranks."""
    statement = script.only("scheduler step")
    loop = script.source.parent(statement) if statement else None
    if isinstance(loop, ast.For) and len(loop.body) == 1 and any(is_ranks(node) for node in ast.walk(loop.iter)):
        script.edits.unwrap(loop)


RULE = Rule(
    en="the schedule advances once for each rank, so that its length depends on the number of ranks",
    zh="调度器为每个 rank 各前进一次：它的长度因此依赖于 rank 的数量",
    patch=advance_once,
    broken="""
for _ in range(world):
    scheduler.step()
""",
    right="""
scheduler.step()
""",
)
