from samestep.judge.places import OF_WEIGHTS, STEP, UPDATES, called
from samestep.rules import Rule

RULE = Rule(
    en="the same trained weights gave another moving average, queue or frozen network: {network}",
    zh="相同的训练权重得到了不同的滑动平均、队列或冻结网络：{network}",
    lines=(OF_WEIGHTS, UPDATES, called("frozen forward"), STEP),
    broken="""
optimizer.step()
for kept, trained in zip(teacher.parameters(), model.parameters()):
    kept.data.mul_(0.01).add_(trained.data, alpha=0.99)
""",
    right="""
optimizer.step()
for kept, trained in zip(teacher.parameters(), model.parameters()):
    kept.data.mul_(0.99).add_(trained.data, alpha=0.01)
""",
)
