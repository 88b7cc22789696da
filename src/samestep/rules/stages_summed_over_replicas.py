from samestep.judge.places import OF_GRADIENTS, REDUCTION
from samestep.rules import Rule

RULE = Rule(
    en="the gradient is {replicas} times the mean along the data axis: it is summed over {replicas:n replica}, and not divided",
    zh="梯度是沿数据轴平均值的 {replicas} 倍：在 {replicas} 个副本上求和而没有做除法",
    lines=(REDUCTION, OF_GRADIENTS),
    broken="""
for p in stage.parameters():
    dist.all_reduce(p.grad, group=same_stage)
optimizer.step()
""",
    right="""
for p in stage.parameters():
    dist.all_reduce(p.grad, group=same_stage)
    p.grad /= dist.get_world_size(same_stage)
optimizer.step()
""",
)
