from samestep.judge.places import BACKWARD, STEP, called
from samestep.rules import Rule

RULE = Rule(
    en="on one of the two sides this step's gradient still holds that of the step before: zero_grad() is not called there",
    zh="在一侧，这一步的梯度中仍含有上一步的梯度：zero_grad()",
    lines=(called("zero_grad"), BACKWARD, STEP),
    broken="""
for x, y in loader:
    loss_of(model(x), y).backward()
    optimizer.step()
""",
    right="""
for x, y in loader:
    loss_of(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
""",
)
