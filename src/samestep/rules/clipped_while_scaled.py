from __future__ import annotations

import ast

from samestep.judge.edits import call_in
from samestep.judge.suggested_patches import Script
from samestep.rules import Rule


def unscale_before_clipping(script: Script) -> None:
    """Divides the gradients by the scaler's factor before they are clipped."""
    clip, step = script.only("clip"), script.only("optimizer step")
    call = call_in(step, "step")
    if clip and call and len(call.args) == 1 and isinstance(call.func, ast.Attribute):
        scaler, optimizer = ast.unparse(call.func.value), ast.unparse(call.args[0])
        script.edits.insert_before(clip, f"{scaler}.unscale_({optimizer})")


RULE = Rule(
    en="the gradients are clipped while they are multiplied by the scaler's factor of {scale:g}. Call scaler.unscale_(optimizer) before the clipping",
    zh="裁剪时梯度仍乘着 scaler 的系数 {scale:g}：scaler.unscale_(optimizer) 应在裁剪之前",
    patch=unscale_before_clipping,
    broken="""
clip_grad_norm_(parameters, 1.0)
scaler.step(optimizer)
""",
    right="""
scaler.unscale_(optimizer)
clip_grad_norm_(parameters, 1.0)
scaler.step(optimizer)
""",
)
