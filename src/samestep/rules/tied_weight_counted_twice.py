from samestep.judge.places import LAST_CHANGES, READS
from samestep.rules import Rule

RULE = Rule(
    en="the gradients are clipped by a norm that counts {names} twice, though they are one weight",
    zh="裁剪所用的范数把 {names} 计算了两次，而它们是同一个权重",
    lines=(LAST_CHANGES, READS),
    broken="""
squares = sum(p.grad.square().sum() for p in stage.parameters())
dist.all_reduce(squares, group=stages)
for p in stage.parameters():
    p.grad.mul_(min(1.0, 1.0 / squares.sqrt().item()))
""",
    right="""
squares = sum(p.grad.square().sum() for p in stage.parameters() if p is not copy_of_embedding)
dist.all_reduce(squares, group=stages)
for p in stage.parameters():
    p.grad.mul_(min(1.0, 1.0 / squares.sqrt().item()))
""",
)
