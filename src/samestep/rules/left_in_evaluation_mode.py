from __future__ import annotations

import ast

from samestep.judge.edits import call_in
from samestep.judge.places import FORWARD, MODES, called
from samestep.judge.suggested_patches import Script
from samestep.rules import Rule


def train_before_the_forward(script: Script) -> None:
    """Puts the model back into training mode before each training forward, if the same file sets its mode."""
    statement = script.only("forward")
    if statement is None:
        return
    callees = {ast.unparse(node.func) for node in ast.walk(statement) if isinstance(node, ast.Call)}
    modes = [call for mode in script.statements(MODES) for name in ("train", "eval") if (call := call_in(mode, name))]
    models = callees & {ast.unparse(mode.func.value) for mode in modes if isinstance(mode.func, ast.Attribute)}
    if len(models) != 1:
        return
    line = f"{models.pop()}.train()"
    if all(ast.unparse(beside) != line for beside in script.source.block(statement)):
        script.edits.insert_before(statement, line)


RULE = Rule(
    en="at step {step} the model is in evaluation mode on {ranks:ranks}: dropout does nothing, and BatchNorm takes its running statistics. Call model.train() after the evaluation",
    zh="第 {step} 步时，{ranks:ranks} 上的模型处于评估模式：dropout 不起作用，BatchNorm 使用运行统计量。请在评估之后调用 model.train()",
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
