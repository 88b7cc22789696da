from samestep.rules import Rule

RULE = Rule(
    en="the schedule is advanced before the optimizer's first step, so that the first rate of the schedule is skipped: call scheduler.step() after optimizer.step()",
    zh="调度器在优化器的第一步之前就前进了，调度的第一个学习率被跳过：请在 optimizer.step() 之后调用 scheduler.step()",
    broken="""
for epoch in range(epochs):
    scheduler.step()
    for x, y in loader:
        loss_of(model(x), y).backward()
        optimizer.step()
""",
    right="""
for epoch in range(epochs):
    for x, y in loader:
        loss_of(model(x), y).backward()
        optimizer.step()
    scheduler.step()
""",
)
