from samestep.judge.places import OF_GRADIENTS, READS, STEP, called, calling
from samestep.rules import Rule

RULE = Rule(
    en="each rank scales its pieces of the gradients by a factor of its own ({factors}): it clips by the norm of the pieces that it holds along {axis}, not by the norm of the whole gradient. torch.nn.utils.clip_grad_norm_ computes the whole norm of DTensors",
    zh="每个 rank 用自己的系数（{factors}）缩放它持有的梯度部分：用的是它在 {axis} 轴上持有部分的范数，而不是整个梯度的范数。torch.nn.utils.clip_grad_norm_ 会对 DTensor 计算整体范数",
    lines=(called("clip"), READS, OF_GRADIENTS, calling(OF_GRADIENTS), STEP),
    broken="""
norm = sum(p.grad.to_local().square().sum() for p in model.parameters()).sqrt()
for p in model.parameters():
    p.grad.mul_(min(1.0, 1.0 / norm.item()))
""",
    right="""
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
""",
)
