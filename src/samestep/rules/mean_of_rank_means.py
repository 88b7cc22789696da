from samestep.judge.places import DIVISORS, LOSS, called
from samestep.rules import Rule

RULE = Rule(
    en="the mean over ranks of each rank's mean is not the mean over all rows or targets: each rank's gradient weighs 1/{ranks}, and in one process {shares}, by the rank's number of rows or targets. Divide the sum of losses by the number on all ranks, and multiply it by the number of ranks where gradients are averaged over them, as DDP does",
    zh="各 rank 平均值的平均不等于所有行或目标的平均：每个 rank 的梯度权重为 1/{ranks}，而单进程中按其数量为 {shares}。请用损失之和除以所有 rank 上的总数；若梯度在各 rank 间取平均（如 DDP），再乘以 rank 数",
    lines=(DIVISORS, called("collective"), *LOSS),
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
