from samestep.rules import Rule

RULE = Rule(
    en="Accelerate advances its prepared schedules once for each process",
    zh="Accelerate 让 prepare 过的调度器为每个进程各前进一次",
    broken="""
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
scheduler = accelerator.prepare(CosineAnnealingLR(optimizer, T_max=epochs * len(loader)))
for x, y in loader:
    accelerator.backward(loss_of(model(x), y))
    optimizer.step()
    scheduler.step()
""",
    right="""
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
scheduler = CosineAnnealingLR(optimizer, T_max=epochs * len(loader))
for x, y in loader:
    accelerator.backward(loss_of(model(x), y))
    optimizer.step()
    scheduler.step()
""",
)
