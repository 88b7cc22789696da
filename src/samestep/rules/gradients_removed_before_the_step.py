from samestep.judge.places import STEP, called
from samestep.judge.suggested_patches import clear_after_the_step
from samestep.rules import Rule

RULE = Rule(
    en="the gradients are removed before the step: zero_grad is called between backward and the optimizer's step",
    zh="梯度在这一步之前被清除：zero_grad 写在 backward 和优化器 step 之间",
    lines=(STEP, called("zero_grad")),
    patch=clear_after_the_step,
    broken="""
loss.backward()
o.zero_grad()
optimizer.step()
""",
    right="""
loss.backward()
optimizer.step()
o.zero_grad()
""",
)
