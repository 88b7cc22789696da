from samestep.rules import Rule

RULE = Rule(
    en="rank {rank} ended after {steps:n step}, and {others:ranks} began the next step, whose collectives wait for rank {rank}. The ranks do not end their training at the same step (early stopping or the best epoch by the rank's own loss, a loader of another length). Reduce the value that decides this over all ranks, as by all_reduce, before it is compared",
    zh="rank {rank} 在 {steps} 步之后结束，而 {others:ranks} 开始了下一步，其集合通信在等待它：各 rank 没有在同一步结束训练（按该 rank 自己的损失提前停止或选最佳，或 DataLoader 长度不同）。请先用 all_reduce 在所有 rank 之间归约，再据此判断",
    broken="""
for epoch in range(epochs):
    loss = evaluate(model)
    if loss > best:
        break
    best = loss
""",
    right="""
for epoch in range(epochs):
    loss = evaluate(model)
    dist.all_reduce(loss)
    if loss > best:
        break
    best = loss
""",
)
