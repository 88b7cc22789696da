from samestep.judge.places import OF_WEIGHTS, UPDATES
from samestep.judge.suggested_patches import average_after_the_step
from samestep.rules import Rule

RULE = Rule(
    en="{network} is updated between the backward pass and the optimizer's step: this moving average is one step behind the weights. Update it after the optimizer's step",
    zh="{network} 在 backward() 与 optimizer.step() 之间更新：滑动平均落后权重一步。请在 optimizer.step() 之后更新",
    lines=(UPDATES, OF_WEIGHTS),
    patch=average_after_the_step,
    broken="""
def update(teacher, model):
    for kept, trained in zip(teacher.parameters(), model.parameters()):
        kept.data.lerp_(trained.data, 0.01)


for x, y in loader:
    loss_of(model(x), y).backward()
    update(teacher, model)
    optimizer.step()
    optimizer.zero_grad()
""",
    right="""
def update(teacher, model):
    for kept, trained in zip(teacher.parameters(), model.parameters()):
        kept.data.lerp_(trained.data, 0.01)


for x, y in loader:
    loss_of(model(x), y).backward()
    optimizer.step()
    update(teacher, model)
    optimizer.zero_grad()
""",
)
