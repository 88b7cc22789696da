from samestep.judge.places import BACKWARD, STEP
from samestep.rules import Rule

RULE = Rule(
    en="the micro-batches after number {micro_batch} of 0 to {last} contribute to no step: the gradients are reduced before the last micro-batch (the flag that lets the last one be reduced is set too early)",
    zh="0 到 {last} 中第 {micro_batch} 个之后的 micro-batch 的梯度没有进入任何一步：在最后一个之前就归约了（允许最后一个归约的标志设置得太早）",
    lines=(STEP, BACKWARD),
    broken="""
for i, (x, y) in enumerate(micro_batches):
    model.set_requires_gradient_sync(i == 2)
    (loss_of(model(x), y) / 4).backward()
optimizer.step()
""",
    right="""
for i, (x, y) in enumerate(micro_batches):
    model.set_requires_gradient_sync(i == 3)
    (loss_of(model(x), y) / 4).backward()
optimizer.step()
""",
)
