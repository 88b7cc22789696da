from samestep.rules import Rule

RULE = Rule(
    en="the schedule ({schedule}) is made, and no line calls its step(): the rate stays as it is. Call scheduler.step() after optimizer.step()",
    zh="创建了调度器（{schedule}），但没有任何一行调用它的 step()：学习率一直不变。请在 optimizer.step() 之后调用 scheduler.step()",
    broken="""
scheduler = CosineAnnealingLR(optimizer, T_max=epochs * len(loader))
for x, y in loader:
    loss_of(model(x), y).backward()
    optimizer.step()
""",
    right="""
scheduler = CosineAnnealingLR(optimizer, T_max=epochs * len(loader))
for x, y in loader:
    loss_of(model(x), y).backward()
    optimizer.step()
    scheduler.step()
""",
)
