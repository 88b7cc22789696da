from samestep.judge.places import OF_WEIGHTS, STEP, called
from samestep.rules import Rule

RULE = Rule(
    en="the same weights and gradient gave other weights: the optimizer or a setting of it is another one, or something else moves the weights",
    zh="相同的权重和梯度得到了不同的权重：设置或优化器不同，或有别的东西移动权重",
    lines=(called("optimizer"), STEP, OF_WEIGHTS),
    broken="""
optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
""",
    right="""
optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
""",
)
