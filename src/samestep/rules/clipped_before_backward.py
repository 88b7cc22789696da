from samestep.judge.suggested_patches import clip_before_the_step
from samestep.rules import Rule

RULE = Rule(
    en="the gradients are clipped before the step's first backward pass computes them: the clipping limits nothing. Clip between the backward pass and the step",
    zh="在本步第一次 backward() 计算梯度之前就裁剪：裁剪没有任何作用。请在 backward() 与 optimizer.step() 之间裁剪",
    patch=clip_before_the_step,
    broken="""
for x, y in loader:
    optimizer.zero_grad()
    clip_grad_norm_(model.parameters(), 1.0)
    loss_of(model(x), y).backward()
    optimizer.step()
""",
    right="""
for x, y in loader:
    optimizer.zero_grad()
    loss_of(model(x), y).backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
""",
)
