from samestep.judge.places import OF_GRADIENTS, OF_WEIGHTS, REDUCTION
from samestep.rules import Rule

RULE = Rule(
    en="the outer step before step {step} goes against the way that the ranks have gone: the pseudo-gradient is the old weights minus the mean of the new ones, and has the other sign here",
    zh="第 {step} 步之前的外层更新与各 rank 权重的变化方向相反：伪梯度应为旧权重减去新权重的平均，这里的符号反了",
    lines=(OF_GRADIENTS, REDUCTION, OF_WEIGHTS),
    broken="""
outer.grad = p.detach() - outer.detach()
""",
    right="""
outer.grad = outer.detach() - p.detach()
""",
)
