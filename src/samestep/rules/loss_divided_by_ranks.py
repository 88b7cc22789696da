from samestep.judge.suggested_patches import drop_the_ranks
from samestep.rules import Rule

RULE = Rule(
    en="the gradients are averaged twice: the loss is divided by the {ranks:n rank}, and the gradients are averaged as well",
    zh="平均了两次：损失除以了 {ranks} 个 rank，梯度又做了平均",
    patch=drop_the_ranks,
    broken="""
(loss / world).backward()
""",
    right="""
loss.backward()
""",
)
