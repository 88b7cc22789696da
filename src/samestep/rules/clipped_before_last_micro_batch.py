from samestep.judge.suggested_patches import clip_before_the_step
from samestep.rules import Rule

RULE = Rule(
    en="the gradients are clipped after micro-batch {micro_batch} of {micro_batches}, before they are complete. Clip after the last micro-batch",
    zh="在 {micro_batches} 个 micro-batch 中的第 {micro_batch} 个之后就裁剪，此时梯度还不完整：裁剪应在最后一个 micro-batch 之后",
    patch=clip_before_the_step,
    broken="""
for x, y in loader:
    first, second = x.chunk(2)
    (loss_of(model(first), y[:8]) / 2).backward()
    clip_grad_norm_(model.parameters(), 1.0)
    (loss_of(model(second), y[8:]) / 2).backward()
    optimizer.step()
""",
    right="""
for x, y in loader:
    first, second = x.chunk(2)
    (loss_of(model(first), y[:8]) / 2).backward()
    (loss_of(model(second), y[8:]) / 2).backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
""",
)
