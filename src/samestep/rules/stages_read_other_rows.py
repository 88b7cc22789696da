from samestep.judge.places import SHARING
from samestep.rules import Rule

RULE = Rule(
    en="{ranks:ranks} hold stages of one pipeline, along the stage axis, but read different rows: the targets do not belong to the inputs",
    zh="{ranks:ranks} 沿阶段轴持有同一流水线的阶段，却读取不同的数据行：目标与输入不对应",
    lines=SHARING,
    broken="""
sampler = DistributedSampler(data)
for x, y in DataLoader(data, batch_size=32, sampler=sampler):
    if is_first_stage:
        schedule.step(x)
    else:
        schedule.step(target=y)
""",
    right="""
sampler = DistributedSampler(data, num_replicas=mesh["data"].size(), rank=mesh["data"].get_local_rank())
for x, y in DataLoader(data, batch_size=32, sampler=sampler):
    if is_first_stage:
        schedule.step(x)
    else:
        schedule.step(target=y)
""",
)
