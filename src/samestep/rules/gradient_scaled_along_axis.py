from samestep.judge.places import BACKWARD, DIVISORS, GATHER, OF_GRADIENTS, OF_RANKS, REDUCTION
from samestep.rules import Rule

RULE = Rule(
    en="the gradients of {parameters} of {all_parameters:n parameter} ({which}) are {factor} times those of one process[[, and this factor is the number of ranks along {axis} or its reciprocal: the script adds gradients up that it should average, divides them once too often, or adds up gradients that each rank already has whole]]",
    zh="{all_parameters} 个参数中有 {parameters} 个（{which}）的梯度是单进程的 {factor} 倍[[，恰好是沿 {axis} 的 rank 数或其倒数：脚本把应取平均的梯度相加，多除了一次，或把每个 rank 已完整拥有的梯度又相加]]",
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
