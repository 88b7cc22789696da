from samestep.judge.places import LAST_CHANGES, READS, STEP, called
from samestep.rules import Rule

RULE = Rule(
    en="each rank clips by the norm of the stages that it holds, not by that of the whole model: its gradients are multiplied by {factors}. Add up the squared norms along the stage axis first",
    zh="每个 rank 按自己持有的阶段的范数裁剪，而不是按整个模型的范数：其梯度乘以 {factors}。请先沿阶段轴把范数的平方相加",
    lines=(called("clip"), LAST_CHANGES, READS, STEP),
    broken="""
clip_grad_norm_(stage.parameters(), 1.0)
optimizer.step()
""",
    right="""
squares = sum(p.grad.square().sum() for p in stage.parameters())
dist.all_reduce(squares, group=stages)
for p in stage.parameters():
    p.grad.mul_(min(1.0, 1.0 / squares.sqrt().item()))
optimizer.step()
""",
)
