from samestep.judge.places import OF_GRADIENTS, STEP, called
from samestep.rules import Rule

RULE = Rule(
    en="the same gradient was clipped by another factor",
    zh="相同的梯度被不同地裁剪",
    lines=(called("clip"), OF_GRADIENTS, STEP),
    broken="""
loss.backward()
clip_grad_value_(model.parameters(), 1.0)
optimizer.step()
""",
    right="""
loss.backward()
clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
""",
)
