from samestep.rules import Rule

RULE = Rule(
    en="a mean of means: a target on rank {rank} weighs {ratio:.4g} times one on rank {other}, because the ranks have different numbers of targets; divide the sum of losses by the number on all ranks",
    zh="平均的平均：rank {rank} 上一个目标的权重是 rank {other} 上的 {ratio:.4g} 倍，因为各 rank 的目标数不同；请用损失之和除以所有 rank 上的目标总数",
    broken="""
model = DDP(Net())
for x, y in loader:
    loss = F.cross_entropy(model(x), y, ignore_index=-100)
    loss.backward()
""",
    right="""
model = DDP(Net())
for x, y in loader:
    targets = (y != -100).sum()
    dist.all_reduce(targets)
    loss = F.cross_entropy(model(x), y, ignore_index=-100, reduction="sum") / targets * world
    loss.backward()
""",
)
