from __future__ import annotations

import ast

from samestep.judge.edits import call_in
from samestep.judge.places import called
from samestep.judge.suggested_patches import Script
from samestep.rules import Rule


def clip_by_the_model(script: Script) -> None:
    """Clips by the model's own method, which knows the pieces of all ranks."""
    clip = script.first(called("clip"))
    call = call_in(clip, "clip_grad_norm_") if clip else None
    parameters = call.args[0] if call and call.args else None
    if call and isinstance(parameters, ast.Call) and isinstance(parameters.func, ast.Attribute) and not parameters.args:
        arguments = [*map(script.edits.code, call.args[1:]), *map(script.edits.code, call.keywords)]
        model = script.edits.code(parameters.func.value)
        script.edits.replace(call, f"{model}.clip_grad_norm_({', '.join(arguments)})")


RULE = Rule(
    en="torch.nn.utils clips parameters that FullyShardedDataParallel shares out: each rank divides by the norm of its own pieces, not by the norm of the whole gradient. Call the model's own clip_grad_norm_",
    zh="torch.nn.utils 裁剪的是 FullyShardedDataParallel 切分后的参数：每个 rank 除以自己那部分的范数，而不是整个梯度的范数。请调用模型自己的 clip_grad_norm_",
    lines=(called("clip"),),
    patch=clip_by_the_model,
    broken="""
model = FullyShardedDataParallel(net)
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
""",
    right="""
model = FullyShardedDataParallel(net)
model.clip_grad_norm_(1.0)
""",
)
