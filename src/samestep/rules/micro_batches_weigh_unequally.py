from samestep.judge.places import BACKWARD, DIVIDES, OF_GRADIENTS
from samestep.rules import Rule

RULE = Rule(
    en="the micro-batches of a step weigh {shares} in its gradient, where each should weigh {even:.4g}: something scales the gradients that earlier micro-batches have left in .grad",
    zh="一步中各 micro-batch 在梯度中的权重为 {shares}，而平均时每个应为 {even:.4g}：之前的 micro-batch 留在 .grad 中的梯度被缩放",
    lines=(DIVIDES, OF_GRADIENTS, BACKWARD),
    broken="""
for x, y in micro_batches:
    loss_of(model(x), y).backward()
    for p in model.parameters():
        p.grad /= len(micro_batches)
optimizer.step()
""",
    right="""
for x, y in micro_batches:
    loss_of(model(x), y).backward()
for p in model.parameters():
    p.grad /= len(micro_batches)
optimizer.step()
""",
)
