from samestep.judge.places import FORWARD, SHARING, called
from samestep.rules import Rule

RULE = Rule(
    en="{ranks:ranks} lie along {axis}: they hold pieces of one model and must read the same rows, but each of them reads different rows. Share the rows out over the {replicas:n replica}, not over the ranks: DistributedSampler(…, num_replicas={replicas}, rank=the rank's place along {data})",
    zh="{ranks:ranks} 位于 {axis} 轴上：它们各持有同一模型的一部分，必须读取相同的数据行，却各读各的。请把数据行分给 {replicas} 个副本，而不是分给各 rank：DistributedSampler(…, num_replicas={replicas}, rank=该 rank 在 {data} 轴上的位置)",
    lines=(called("sampler"), *SHARING, FORWARD),
    broken="""
sampler = DistributedSampler(data)
loader = DataLoader(data, sampler=sampler)
""",
    right="""
sampler = DistributedSampler(data, num_replicas=mesh["data"].size(), rank=mesh["data"].get_local_rank())
loader = DataLoader(data, sampler=sampler)
""",
)
