from samestep.judge.places import FORWARD, called
from samestep.rules import Rule

RULE = Rule(
    en="the same weights and rows gave other BatchNorm statistics: the momentum of BatchNorm, or the way it is used, is another one",
    zh="相同的权重和数据行得到了不同的 BatchNorm 统计量：其动量或使用方式不同",
    lines=(called("model", "BatchNorm"), called("model"), FORWARD),
    broken="""
model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64, momentum=0.9))
features = model(x)
""",
    right="""
model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64, momentum=0.1))
features = model(x)
""",
)
