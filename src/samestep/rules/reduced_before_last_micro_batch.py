from __future__ import annotations

import ast
from typing import Any

from samestep.judge.places import BACKWARD, written
from samestep.judge.source_search import synchronisation
from samestep.judge.suggested_patches import Script
from samestep.rules import Rule


def reduce_at_the_last_micro_batch(script: Script) -> None:
    """Makes the wrapper reduce at the last micro-batch, not at the first one."""
    for statement in script.shared():
        for node in ast.walk(_items(statement) if hasattr(statement, "body") else statement):
            match node:
                case ast.Compare(ast.BinOp(ast.Name() as number, ast.Mod()), [ast.Eq()], [ast.Constant(0)]):
                    script.edits.replace(number, f"({number.id} + 1)")
                    return
                case ast.Compare(ast.Name(), [ast.Eq()], [ast.Constant(0) as zero]):
                    if count := script.source.micro_batches(statement.lineno):
                        script.edits.replace(zero, f"{count} - 1")
                    return


def _items(statement: ast.stmt) -> ast.AST:
    items: list[Any] = [item.context_expr for item in getattr(statement, "items", [])]
    return ast.Tuple(items, ast.Load())


RULE = Rule(
    en="the gradients are reduced before the last micro-batch, after number {micro_batch} of 0 to {last}; each rank then adds the gradients of its own later micro-batches (no_sync is left too early, or the flag is set after the forward)",
    zh="在最后一个 micro-batch 之前就归约：0 到 {last} 中只到第 {micro_batch} 个，之后每个 rank 加上自己的（过早离开 no_sync，或标志在 forward 之后才设置）",
    lines=(written(synchronisation), BACKWARD),
    patch=reduce_at_the_last_micro_batch,
    broken="""
with nullcontext() if i % n == 0 else model.no_sync():
    loss.backward()
""",
    right="""
with nullcontext() if (i + 1) % n == 0 else model.no_sync():
    loss.backward()
""",
)
