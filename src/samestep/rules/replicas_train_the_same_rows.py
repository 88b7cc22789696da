from samestep.judge.places import OF_ONE_ORDER
from samestep.rules import Rule

RULE = Rule(
    en="the {replicas:n replica} along {axis} train the same rows in the same step: the rows are not shared out over the replicas, or the random numbers that choose the rows have one seed",
    zh="沿 {axis} 的 {replicas} 个副本在同一步训练相同的数据行：数据行没有分给它们，或者选取数据行的随机数使用了同一个种子",
    lines=OF_ONE_ORDER,
    broken="""
sampler = DistributedSampler(data, num_replicas=1, rank=0)
loader = DataLoader(data, sampler=sampler)
""",
    right="""
sampler = DistributedSampler(data, num_replicas=mesh["data"].size(), rank=mesh["data"].get_local_rank())
loader = DataLoader(data, sampler=sampler)
""",
)
