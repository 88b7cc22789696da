from samestep.judge.places import OF_GRADIENTS, PIPELINE_STEP, called
from samestep.rules import Rule

RULE = Rule(
    en="the gradients of stage {stage} leave out the micro-batches {left} of {micro_batches} ({wrong} of {parameters:n parameter})",
    zh="阶段 {stage} 的梯度遗漏了 {micro_batches} 个微批次中的 {left}（{parameters} 个参数中有 {wrong} 个）",
    lines=(called("zero_grad"), OF_GRADIENTS, PIPELINE_STEP),
    broken="""
for inputs, targets in zip(x.chunk(2), y.chunk(2)):
    optimizer.zero_grad()
    schedule.step(inputs, target=targets)
optimizer.step()
""",
    right="""
optimizer.zero_grad()
schedule.step(x, target=y)
optimizer.step()
""",
)
