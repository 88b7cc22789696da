from samestep.judge.places import OF_GRADIENTS, called, calling
from samestep.judge.suggested_patches import clip_before_the_step
from samestep.rules import Rule

RULE = Rule(
    en="the gradients are clipped before they are reduced: each rank clips its own gradient by its own norm, and the mean of these gradients is not the clipped mean",
    zh="在归约之前裁剪：每个 rank 按自己的范数裁剪自己的梯度，它们的平均是另一个梯度",
    lines=(called("clip"), calling(OF_GRADIENTS), OF_GRADIENTS),
    patch=clip_before_the_step,
    broken="""
loss_of(model(x), y).backward()
clip_grad_norm_(model.parameters(), 1.0)
for parameter in model.parameters():
    dist.all_reduce(parameter.grad)
    parameter.grad /= world
optimizer.step()
""",
    right="""
loss_of(model(x), y).backward()
for parameter in model.parameters():
    dist.all_reduce(parameter.grad)
    parameter.grad /= world
clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
""",
)
