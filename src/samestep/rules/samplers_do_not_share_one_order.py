from samestep.judge.places import OF_ONE_ORDER
from samestep.judge.suggested_patches import share_one_order
from samestep.rules import Rule

RULE = Rule(
    en="many rows are read by several ranks: the ranks' samplers do not share one order (another seed or epoch)",
    zh="许多数据行被多个 rank 读取：各 rank 的采样器没有使用同一个顺序（种子或 epoch 不同）",
    lines=OF_ONE_ORDER,
    patch=share_one_order,
    broken="""
sampler = DistributedSampler(data, seed=rank)
""",
    right="""
sampler = DistributedSampler(data, seed=0)
""",
)
