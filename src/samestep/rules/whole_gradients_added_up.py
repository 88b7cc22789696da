from samestep.judge.places import OF_GRADIENTS, REDUCTION, STEP
from samestep.rules import Rule

RULE = Rule(
    en="each rank along {axis} already has the whole gradients of {parameters:n parameter}, but these are added up over the {ranks} ranks and become {ranks} times too large",
    zh="沿 {axis} 的每个 rank 已完整拥有 {parameters} 个参数的梯度，却又在这 {ranks} 个 rank 上相加：放大了 {ranks} 倍",
    lines=(REDUCTION, OF_GRADIENTS, STEP),
    broken="""
for p in model.parameters():
    dist.all_reduce(p.grad, group=tensor)
optimizer.step()
""",
    right="""
optimizer.step()
""",
)
