from samestep.judge.places import OF_GRADIENTS, REDUCTION, called
from samestep.rules import Rule

RULE = Rule(
    en="the gradients of stage {stage} include those of other stages' parameters ({wrong} of {parameters}): the reduction runs over ranks that hold different stages. Reduce over the ranks that hold the same stage",
    zh="阶段 {stage} 的梯度中加入了其他阶段参数的梯度（{parameters} 个中有 {wrong} 个）：归约跨越了持有其他阶段的 rank。请只在持有同一阶段的 rank 之间归约",
    lines=(REDUCTION, OF_GRADIENTS, called("wrapper")),
    broken="""
for p in stage.parameters():
    dist.all_reduce(p.grad)
    p.grad /= len(replicas)
""",
    right="""
for p in stage.parameters():
    dist.all_reduce(p.grad, group=same_stage)
    p.grad /= len(replicas)
""",
)
