from samestep.judge.places import OF_WEIGHTS, beside, called, calling, network
from samestep.judge.source import Source
from samestep.rules import Rule

RULE = Rule(
    en="{network} begins as a copy of the trained weights and does not change in {steps:n step}: this moving average is never updated, or is updated from another model than the trained one",
    zh="{network} 初始为训练权重的副本，在 {steps} 步中一直停在原处：滑动平均从未更新，或用来求平均的不是被训练的模型",
    lines=(
        network,
        called("frozen forward"),
        beside(OF_WEIGHTS, Source.conditions),
        calling(OF_WEIGHTS),
        OF_WEIGHTS,
    ),
    broken="""
teacher, first = copy.deepcopy(net), copy.deepcopy(net)
for x, y in loader:
    loss_of(model(x), teacher(x)).backward()
    optimizer.step()
    for kept, trained in zip(teacher.parameters(), first.parameters()):
        kept.data.lerp_(trained.data, 0.01)
""",
    right="""
teacher, first = copy.deepcopy(net), copy.deepcopy(net)
for x, y in loader:
    loss_of(model(x), teacher(x)).backward()
    optimizer.step()
    for kept, trained in zip(teacher.parameters(), net.parameters()):
        kept.data.lerp_(trained.data, 0.01)
""",
)
