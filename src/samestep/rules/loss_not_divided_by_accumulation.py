from __future__ import annotations

import ast

from samestep.judge.edits import call_in
from samestep.judge.places import BACKWARD, FORWARD
from samestep.judge.suggested_patches import Script
from samestep.rules import Rule


def divide_by_accumulation(script: Script) -> None:
    """Divides the loss that is given to backward() by the number of micro-batches."""
    statement = script.only("backward")
    loss = _loss_of(statement)
    if statement is None or loss is None:
        return
    count = script.source.micro_batches(statement.lineno) or str(
        script.context.finding.message.fields.get("micro_batches", "")
    )
    if count:
        code = script.edits.code(loss)
        divided = f"{code} / {count}" if isinstance(loss, ast.Name) else f"({code}) / {count}"
        is_object = _is_object(statement, loss)
        script.edits.replace(loss, f"({divided})" if is_object else divided)


def _loss_of(statement: ast.stmt | None) -> ast.expr | None:
    """Returns the loss in `loss.backward()`, `scaler.scale(loss).backward()` or `accelerator.backward(loss)`."""
    call = call_in(statement, "backward")
    if call is None or not isinstance(call.func, ast.Attribute):
        return None
    if call.args:
        return call.args[0]
    scaled = call.func.value
    if isinstance(scaled, ast.Call) and ast.unparse(scaled.func).endswith(".scale") and len(scaled.args) == 1:
        return scaled.args[0]
    return scaled


def _is_object(statement: ast.stmt, loss: ast.expr) -> bool:
    """Whether a loss is what backward() is called of, and has no brackets yet."""
    return any(isinstance(node, ast.Attribute) and node.value is loss for node in ast.walk(statement)) and isinstance(
        loss, ast.Name
    )


RULE = Rule(
    en="the losses of {micro_batches} accumulated micro-batches are not divided by {micro_batches}: the step is {micro_batches} times too large",
    zh="{micro_batches} 个累积的 micro-batch 的损失没有除以 {micro_batches}：这一步大了 {micro_batches} 倍",
    lines=(BACKWARD, FORWARD),
    patch=divide_by_accumulation,
    broken="""
for epoch in range(3):
    for i, (x, y) in enumerate(loader):
        loss = loss_of(model(x), y)
        loss.backward()
        if (i + 1) % args.steps == 0:
            optimizer.step()
""",
    right="""
for epoch in range(3):
    for i, (x, y) in enumerate(loader):
        loss = loss_of(model(x), y)
        (loss / args.steps).backward()
        if (i + 1) % args.steps == 0:
            optimizer.step()
""",
)
