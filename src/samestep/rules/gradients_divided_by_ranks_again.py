from samestep.judge.places import LOSS, OF_GRADIENTS, REDUCTION, beside
from samestep.judge.source import Source
from samestep.judge.suggested_patches import drop_the_ranks
from samestep.rules import Rule

RULE = Rule(
    en="the gradients are averaged twice: the reduced gradients are divided by the {ranks:n rank} once more",
    zh="平均了两次：归约后的梯度又除以了 {ranks} 个 rank",
    lines=(beside(REDUCTION, Source.uses), OF_GRADIENTS, *LOSS),
    patch=drop_the_ranks,
    broken="""
p.grad /= world * world
loss.backward()
""",
    right="""
p.grad /= world
loss.backward()
""",
)
