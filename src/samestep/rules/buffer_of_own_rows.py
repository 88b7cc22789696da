from samestep.judge.places import buffer, into
from samestep.rules import Rule

RULE = Rule(
    en="{buffer} is not the same on all ranks from step {step} on: each rank computes this centre, codebook or statistic from its own rows. Reduce the values that it is computed from over the ranks first, for example with all_reduce",
    zh="从第 {step} 步起 {buffer} 在各 rank 上不同：每个 rank 用自己的数据行计算它（中心、码本或统计量）。请先用 all_reduce 在各 rank 之间归约",
    lines=(buffer, into(buffer)),
    broken="""
mean = teacher(x).mean(0)
net.centre.mul_(0.9).add_(mean, alpha=0.1)
""",
    right="""
mean = teacher(x).mean(0) / world
dist.all_reduce(mean)
net.centre.mul_(0.9).add_(mean, alpha=0.1)
""",
)
