from samestep.rules import Rule

RULE = Rule(
    en="the ranks' gradient is 1/{ranks} times that of one process, which accumulates {ranks} times as many micro-batches: the losses, or the gradients, are not divided by the number of micro-batches",
    zh="各 rank 的梯度是单进程的 1/{ranks}，而单进程累积了 {ranks} 倍的 micro-batch：损失或梯度没有除以 micro-batch 数",
    broken="""
accumulate = 8 // world
for i, (x, y) in enumerate(loader, 1):
    loss_of(model(x), y).backward()
    if i % accumulate == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
    right="""
accumulate = 8 // world
for i, (x, y) in enumerate(loader, 1):
    (loss_of(model(x), y) / accumulate).backward()
    if i % accumulate == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
)
