from samestep.judge.places import FREEZES, parameter
from samestep.rules import Rule

RULE = Rule(
    en="{parameters:n parameter} {parameters:is|are} trained on one side, and frozen on the other",
    zh="{parameters} 个参数在一侧被训练，在另一侧被冻结",
    lines=(FREEZES, parameter),
    broken="""
net = Net()
net.body.requires_grad_(False)
model = DDP(net)
""",
    right="""
net = Net()
model = DDP(net)
""",
)
