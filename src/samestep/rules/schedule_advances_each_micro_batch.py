from __future__ import annotations

from samestep.judge.suggested_patches import Script, move_statement
from samestep.rules import Rule


def advance_after_the_step(script: Script) -> None:
    """Advances the schedule with the optimizer's step."""
    statement, step = script.only("scheduler step"), script.only("optimizer step")
    if statement and step:
        move_statement(script, statement, after=step)


RULE = Rule(
    en="the schedule advances once a micro-batch, not once a step: call scheduler.step() where optimizer.step() is called",
    zh="调度器每个 micro-batch 前进一次，而不是每步一次：请在调用 optimizer.step() 的地方调用 scheduler.step()",
    patch=advance_after_the_step,
    broken="""
for step in range(3):
    for x, y in micro_batches(step):
        loss_of(model(x), y).backward()
        scheduler.step()
    optimizer.step()
    optimizer.zero_grad()
""",
    right="""
for step in range(3):
    for x, y in micro_batches(step):
        loss_of(model(x), y).backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
""",
)
