from samestep.judge.places import BACKWARD, DIVIDES, OF_GRADIENTS, calling
from samestep.rules import Rule

RULE = Rule(
    en="rank {rank} steps with a gradient in which the ranks' own gradients weigh {shares}, where each should weigh {even:.4g}: something scales the gradients of some ranks before they are added up",
    zh="在 rank {rank} 更新所用的梯度中，各 rank 自己的梯度权重为 {shares}，而平均时每个应为 {even:.4g}：某些 rank 的梯度在相加之前被缩放",
    lines=(calling(OF_GRADIENTS), DIVIDES, OF_GRADIENTS, BACKWARD),
    broken="""
for p in model.parameters():
    if rank == 0:
        p.grad /= world
    dist.all_reduce(p.grad)
""",
    right="""
for p in model.parameters():
    p.grad /= world
    dist.all_reduce(p.grad)
""",
)
