from __future__ import annotations

import ast

from samestep.judge.edits import call_in
from samestep.judge.suggested_patches import Script
from samestep.rules import Rule


def clip_all_together(script: Script) -> None:
    """Clips all parameters together in place of a loop that clips each."""
    clip = script.only("clip")
    loop = script.source.parent(clip) if clip else None
    call = call_in(clip, "clip_grad_norm_")
    if call and isinstance(loop, ast.For) and len(loop.body) == 1 and call.args:
        clipped = script.edits.code(call)
        first = script.edits.code(call.args[0])
        if first == script.edits.code(loop.target):
            script.edits.replace(loop, clipped.replace(f"({first},", f"({script.edits.code(loop.iter)},", 1))


RULE = Rule(
    en="the gradients are clipped in {parts:n part}, each by its own norm and not by the norm of all parameters",
    zh="分 {parts} 部分裁剪，各按自己的范数，而不是按所有参数的范数",
    patch=clip_all_together,
    broken="""
for p in model.parameters():
    clip_grad_norm_(p, 1.0)
""",
    right="""
clip_grad_norm_(model.parameters(), 1.0)
""",
)
