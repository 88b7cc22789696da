from samestep.judge.places import OF_GRADIENTS, REDUCTION, SCHEDULE
from samestep.rules import Rule

RULE = Rule(
    en="the gradient is 1/{replicas} of the mean along the data axis: the mean over {replicas:n replica} is divided once more",
    zh="梯度是沿数据轴平均值的 1/{replicas}：{replicas} 个副本的平均又被除了一次",
    lines=(OF_GRADIENTS, REDUCTION, SCHEDULE),
    broken="""
for p in stage.parameters():
    dist.all_reduce(p.grad, group=same_stage)
    p.grad /= dist.get_world_size(same_stage)
    p.grad /= dist.get_world_size(same_stage)
""",
    right="""
for p in stage.parameters():
    dist.all_reduce(p.grad, group=same_stage)
    p.grad /= dist.get_world_size(same_stage)
""",
)
