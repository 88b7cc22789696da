from samestep.judge.places import called
from samestep.rules import Rule

RULE = Rule(
    en="{kind} is made with other numbers, which may act in these steps or only later",
    zh="{kind} 使用了不同的数值，无论在这些步中还是之后起作用",
    lines=(called("scheduler"), called("scheduler step")),
    broken="""
scheduler = StepLR(optimizer, step_size=30, gamma=0.5)
""",
    right="""
scheduler = StepLR(optimizer, step_size=30, gamma=0.1)
""",
)
