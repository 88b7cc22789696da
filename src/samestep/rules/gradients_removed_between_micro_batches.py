from samestep.judge.places import BACKWARD, called
from samestep.judge.suggested_patches import clear_after_the_step
from samestep.rules import Rule

RULE = Rule(
    en="the gradients of {removed} of {micro_batches:n micro-batch} were removed before the step (zero_grad inside the accumulation)",
    zh="{micro_batches} 个 micro-batch 中有 {removed} 个的梯度在这一步之前被清除（zero_grad 写在梯度累积循环内）",
    lines=(called("zero_grad"), BACKWARD),
    patch=clear_after_the_step,
    broken="""
for x, y in loader:
    for inputs, targets in zip(x.chunk(4), y.chunk(4)):
        optimizer.zero_grad()
        (loss_of(model(inputs), targets) / 4).backward()
    optimizer.step()
""",
    right="""
for x, y in loader:
    for inputs, targets in zip(x.chunk(4), y.chunk(4)):
        (loss_of(model(inputs), targets) / 4).backward()
    optimizer.step()
    optimizer.zero_grad()
""",
)
