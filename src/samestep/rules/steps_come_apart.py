from samestep.judge.places import AVERAGES, BACKWARD
from samestep.rules import Rule

RULE = Rule(
    en="the first gradients are those of one process, but the later ones come apart from step to step: the step itself (clipping, optimizer, weight decay, averaging of weights) depends on the number of ranks",
    zh="最初的梯度与单进程相同，之后逐步分开：优化器步本身（裁剪、优化器、权重衰减、权重平均）依赖于 rank 的数量",
    lines=(*AVERAGES, BACKWARD),
    broken="""
loss.backward()
optimizer.step()
with torch.no_grad():
    for p in model.parameters():
        p.mul_(1 - 0.002 * world)
""",
    right="""
loss.backward()
optimizer.step()
with torch.no_grad():
    for p in model.parameters():
        p.mul_(1 - 0.002)
""",
)
