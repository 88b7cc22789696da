from samestep.judge.suggested_patches import clip_before_the_step
from samestep.rules import Rule

RULE = Rule(
    en="the gradients are clipped after each micro-batch, {clips} times a step. Clip once, after the last micro-batch",
    zh="每个 micro-batch 之后都裁剪，一步 {clips} 次：裁剪应在最后一个 micro-batch 之后",
    patch=clip_before_the_step,
    broken="""
for step in range(3):
    for x, y in micro_batches(step):
        loss_of(model(x), y).backward()
        clip_grad_norm_(p, 1)
    optimizer.step()
    optimizer.zero_grad()
""",
    right="""
for step in range(3):
    for x, y in micro_batches(step):
        loss_of(model(x), y).backward()
    clip_grad_norm_(p, 1)
    optimizer.step()
    optimizer.zero_grad()
""",
)
