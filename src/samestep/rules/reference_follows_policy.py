from __future__ import annotations

import ast

from samestep.judge.places import called, written
from samestep.judge.source_search import aliases
from samestep.judge.suggested_patches import Script
from samestep.rules import Rule


def copy_the_reference(script: Script) -> None:
    """Makes a reference a frozen copy of the policy, in place of another name for it."""
    statement = script.only(written(aliases))
    if isinstance(statement, ast.Assign) and "copy" in script.source.imports:
        policy = script.edits.code(statement.value)
        script.edits.replace(statement.value, f"copy.deepcopy({policy}).eval().requires_grad_(False)")


RULE = Rule(
    en="the loss is {loss:.6g} in each of {steps:n step}, though the rows differ and the weights move: the reference or teacher that the loss compares with (forward passes without gradients) has the trained weights themselves. Take a copy (copy.deepcopy) before the training, and freeze it",
    zh="{steps} 步的损失在不同的数据行上都恰好是 {loss:.6g}，而权重在变化：与之比较的无梯度前向（参考模型、教师）用的就是被训练的权重本身。请在训练前用 copy.deepcopy 复制一份并冻结",
    lines=(written(aliases), called("evaluation")),
    patch=copy_the_reference,
    broken="""
import copy
policy = Net()
reference = policy
""",
    right="""
import copy
policy = Net()
reference = copy.deepcopy(policy).eval().requires_grad_(False)
""",
)
