from samestep.rules import Rule

RULE = Rule(
    en="the learning rate is computed from the number of micro-batches, which is {micro_batches} times the number of steps, and rises again from step {step} on: the schedule ends too early. Give the function the number of steps",
    zh="学习率按 micro-batch 计数（是步数的 {micro_batches} 倍），并从第 {step} 步起再次上升：调度过早走到了终点。请把步数传给该函数",
    broken="""
for i, (x, y) in enumerate(loader):
    group["lr"] = rate_at(i)
    (loss_of(model(x), y) / 4).backward()
    if i % 4 == 3:
        optimizer.step()
""",
    right="""
for i, (x, y) in enumerate(loader):
    group["lr"] = rate_at(i // 4)
    (loss_of(model(x), y) / 4).backward()
    if i % 4 == 3:
        optimizer.step()
""",
)
