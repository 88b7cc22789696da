from samestep.rules import Rule

RULE = Rule(
    en="the number of accumulated micro-batches depends on the number of ranks: each of {ranks} ranks accumulates {micro_batches}, and one process accumulates {replayed}, where the same batch needs {micro_batches} or {together}",
    zh="累积的 micro-batch 数依赖于 rank 的数量：{ranks} 个 rank 各 {micro_batches} 个，单进程 {replayed} 个，而同样的批次应为 {micro_batches} 或 {together} 个",
    broken="""
accumulate = 4 * world
for i, (x, y) in enumerate(loader, 1):
    (loss_of(model(x), y) / accumulate).backward()
    if i % accumulate == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
    right="""
accumulate = 4
for i, (x, y) in enumerate(loader, 1):
    (loss_of(model(x), y) / accumulate).backward()
    if i % accumulate == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
)
