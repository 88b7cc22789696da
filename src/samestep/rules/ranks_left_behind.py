from samestep.rules import Rule

RULE = Rule(
    en="rank {rank} had ended after {steps:n optimizer step}, and {behind}, when a collective waited for rank {rank}. The ranks do not step equally often (a condition on the rank skips steps, or its loader has fewer batches, as under Join)",
    zh="某个集合通信在等待已经结束的 rank：rank {rank} 已走完它的 {steps} 个优化器步，而 {behind}：各 rank 的步数不同（依赖 rank 的条件跳过了一些步，或者其 DataLoader 批次较少，例如使用 Join 时）",
    broken="""
for x, y in loader:
    loss = loss_of(model(x), y)
    loss.backward()
    if loss < limit:
        optimizer.step()
    optimizer.zero_grad()
""",
    right="""
for x, y in loader:
    loss = loss_of(model(x), y)
    loss.backward()
    mean = loss.detach() / world
    dist.all_reduce(mean)
    if mean < limit:
        optimizer.step()
    optimizer.zero_grad()
""",
)
