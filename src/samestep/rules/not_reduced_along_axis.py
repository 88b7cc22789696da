from samestep.judge.places import OF_GRADIENTS, REDUCTION, STEP, around, beside, parameter
from samestep.judge.source import Source
from samestep.rules import Rule

RULE = Rule(
    en="the gradients of {parameters} of {all_parameters:n parameter} are not reduced along {axis}: each of these ranks steps with its own gradient, and only together are they that of one process",
    zh="{all_parameters} 个参数中有 {parameters} 个的梯度没有沿 {axis} 归约：每个 rank 只用自己的那一份，合起来才是一个进程的梯度",
    lines=(beside(REDUCTION, Source.conditions), around(REDUCTION), OF_GRADIENTS, parameter, STEP),
    broken="""
for p in model.parameters():
    if p.dim() > 1:
        dist.all_reduce(p.grad, group=replicas)
""",
    right="""
for p in model.parameters():
    dist.all_reduce(p.grad, group=replicas)
""",
)
