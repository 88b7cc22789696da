from samestep.proof.script.places import OF_GRADIENTS, REDUCTION, STEP
from samestep.rules import Rule

RULE = Rule(
    en="the gradients of {parameters:n parameter} that each rank along {axis} has whole are added up over these {ranks} ranks: {ranks} times too large",
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
