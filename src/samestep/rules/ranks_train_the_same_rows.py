from samestep.judge.places import OF_ONE_ORDER
from samestep.judge.suggested_patches import share_one_order
from samestep.rules import Rule

RULE = Rule(
    en="the ranks train the same rows in the same step: the random numbers that choose them have one seed, or the rows are not shared out",
    zh="各 rank 在同一步训练相同的数据行：选取数据行的随机数使用了同一个种子，或者数据没有分给各 rank",
    lines=OF_ONE_ORDER,
    patch=share_one_order,
    broken="""
sampler = DistributedSampler(data, num_replicas=2, rank=0)
""",
    right="""
sampler = DistributedSampler(data, num_replicas=2, rank=torch.distributed.get_rank())
""",
)
