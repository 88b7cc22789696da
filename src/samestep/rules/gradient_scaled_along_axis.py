from samestep.proof.script.places import BACKWARD, DIVISORS, GATHER, OF_GRADIENTS, OF_RANKS, REDUCTION
from samestep.rules import Rule

RULE = Rule(
    en="{which} gradients: {parameters} of {all_parameters:n parameter} have {factor} times the gradient of one process[[, which is the number of ranks along {axis}, or one by it. They are added up where they are to be averaged, divided once too often, or added up where each rank has them whole]]",
    zh="{which}：{all_parameters} 个参数中有 {parameters} 个的梯度是一个进程的 {factor} 倍[[，即沿 {axis} 的 rank 数或其倒数：应取平均处相加了，多除了一次，或各 rank 已有完整梯度却又相加]]",
    lines=(REDUCTION, OF_GRADIENTS, *OF_RANKS, DIVISORS, GATHER, BACKWARD),
    broken="""
for name, p in model.named_parameters():
    if "experts" not in name:  # an expert has the rows of all ranks
        dist.all_reduce(p.grad)
        p.grad /= world
""",
    right="""
for name, p in model.named_parameters():
    if "experts" not in name:  # an expert has the rows of all ranks
        dist.all_reduce(p.grad)
    p.grad /= world
""",
)
