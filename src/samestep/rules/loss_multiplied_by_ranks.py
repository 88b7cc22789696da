from samestep.judge.suggested_patches import drop_the_ranks
from samestep.rules import Rule

RULE = Rule(
    en="the loss is multiplied by the {ranks:n rank}, and the gradients are averaged: the result is their sum, not their mean",
    zh="损失乘以了 {ranks} 个 rank，而梯度做了平均：得到的是和，不是平均",
    patch=drop_the_ranks,
    broken="""
f(x * dist.get_world_size()).backward()
""",
    right="""
f(x).backward()
""",
)
