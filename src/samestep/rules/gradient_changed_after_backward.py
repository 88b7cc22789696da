from samestep.judge.places import OF_GRADIENTS, flowing
from samestep.rules import Rule

RULE = Rule(
    en="the backward passes of the ranks together compute the gradient of one process, but the ranks step with another one, which is the same on all of them: what stands between backward() and step() makes it (a reduction that is not the mean, a change before the gradients are averaged, or code that depends on the number of ranks)",
    zh="各 rank 的反向传播合起来算出的是单进程的梯度，但各 rank 更新时用的是另一个梯度，且所有 rank 相同：错误在 backward() 与 step() 之间（归约不是求平均、在求平均之前改变了梯度，或代码依赖于 rank 的数量）",
    lines=(flowing(OF_GRADIENTS), OF_GRADIENTS),
    broken="""
loss.backward()
for p in model.parameters():
    p.grad.clamp_(-0.1 / world, 0.1 / world)
optimizer.step()
""",
    right="""
loss.backward()
for p in model.parameters():
    p.grad.clamp_(-0.1, 0.1)
optimizer.step()
""",
)
