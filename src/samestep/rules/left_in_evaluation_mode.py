from __future__ import annotations

import ast

from samestep.proof.script.edits import call_in
from samestep.proof.script.places import FORWARD, MODES, called
from samestep.proof.script.suggested_patches import Script
from samestep.rules import Rule


def train_before_the_forward(script: Script) -> None:
    """Puts the model that eval() is called of back into training mode before each training forward."""
    statement, modes = script.first("forward"), [call_in(mode, "eval") for mode in script.statements(MODES)]
    models = {ast.unparse(call.func.value) for call in modes if call and isinstance(call.func, ast.Attribute)}
    if statement and len(models) == 1:
        script.edits.insert_before(statement, f"{models.pop()}.train()")


RULE = Rule(
    en="from step {step} on the model is in evaluation mode on {ranks:ranks}: dropout does nothing, and BatchNorm takes its running statistics. Call model.train() after the evaluation",
    zh="从第 {step} 步起，{ranks:ranks} 上的模型处于评估模式：dropout 不起作用，BatchNorm 使用滑动统计量。请在评估之后调用 model.train()",
    lines=(MODES, called("evaluation"), FORWARD),
    patch=train_before_the_forward,
    broken="""
model.train()
for step, (x, y) in enumerate(loader):
    loss = loss_of(model(x), y)
    loss.backward()
    if step % 100 == 0:
        model.eval()
        evaluate(model)
""",
    right="""
model.train()
for step, (x, y) in enumerate(loader):
    model.train()
    loss = loss_of(model(x), y)
    loss.backward()
    if step % 100 == 0:
        model.eval()
        evaluate(model)
""",
)
