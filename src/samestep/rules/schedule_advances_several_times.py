from samestep.rules import Rule

RULE = Rule(
    en="the schedule advances several times a step",
    zh="调度器在一步中前进多次",
    broken="""
for x, y in loader:
    loss_of(model(x), y).backward()
    optimizer.step()
    scheduler.step()
    scheduler.step()
""",
    right="""
for x, y in loader:
    loss_of(model(x), y).backward()
    optimizer.step()
    scheduler.step()
""",
)
