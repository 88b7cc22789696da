from __future__ import annotations

import ast

from samestep.judge.places import BACKWARD, FORWARD, READS, UNWRAPPED, called, written
from samestep.judge.source_search import synchronisation
from samestep.judge.suggested_patches import Script
from samestep.rules import Rule


def forward_through_the_wrapper(script: Script) -> None:
    """Calls the wrapper in place of what it wraps."""
    statement = script.only("forward")
    calls = [
        node
        for node in ast.walk(statement or ast.Pass())
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "module"
    ]
    if len(calls) == 1 and isinstance(calls[0].func, ast.Attribute):
        script.edits.replace(calls[0].func, script.edits.code(calls[0].func.value))


RULE = Rule(
    en="the gradients are never reduced: each rank steps with its own (forward through .module, no_sync that is never left, or no wrapper at all); where ranks step apart on purpose and bring their weights together later, as in local SGD, --meant local_sgd says so, and --steps records until they do",
    zh="梯度从未归约：每个 rank 用自己的梯度更新（通过 .module 前向、一直没有离开 no_sync，或根本没有包装模型）；如果各 rank 有意分别更新、之后再合并权重（如 local SGD），用 --meant local_sgd 声明，并用 --steps 记录到合并为止",
    lines=(
        UNWRAPPED,
        written(synchronisation),
        FORWARD,
        BACKWARD,
        called("wrapper"),
        READS,
    ),
    patch=forward_through_the_wrapper,
    broken="""
loss = model.module(x).mean()
""",
    right="""
loss = model(x).mean()
""",
)
