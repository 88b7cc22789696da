from __future__ import annotations

import ast

from samestep.judge.edits import call_in
from samestep.judge.places import BACKWARD, STEP, called
from samestep.judge.suggested_patches import Script
from samestep.rules import Rule


def clear_gradients(script: Script) -> None:
    """Clears the gradients after each step."""
    statement = script.only("optimizer step")
    if statement and (optimizer := _optimizer_of(statement)):
        script.edits.insert_after(statement, f"{optimizer}.zero_grad()")


def _optimizer_of(statement: ast.stmt) -> str:
    """Returns the optimizer in `optimizer.step()` or `scaler.step(optimizer)`."""
    call = call_in(statement, "step")
    if call is None or not isinstance(call.func, ast.Attribute):
        return ""
    stepped = call.args[0] if len(call.args) == 1 else call.func.value
    return ast.unparse(stepped) if isinstance(stepped, ast.Name | ast.Attribute) else ""


RULE = Rule(
    en="the gradients of the step before are never cleared: this step's are added to them (zero_grad is missing)",
    zh="前一步的梯度从未清除：这一步的梯度被加到上面（缺少 zero_grad）",
    lines=(BACKWARD, called("zero_grad"), STEP),
    patch=clear_gradients,
    broken="""
for epoch in range(3):
    for i, (x, y) in enumerate(loader):
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
""",
    right="""
for epoch in range(3):
    for i, (x, y) in enumerate(loader):
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
""",
)
