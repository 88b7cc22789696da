from samestep.judge.places import OF_WEIGHTS, UPDATES
from samestep.judge.suggested_patches import average_after_the_step
from samestep.rules import Rule

RULE = Rule(
    en="{network} is updated {updates} times a step, after each micro-batch: the weights move once a step, so this moving average follows them {updates} times as fast. Update it after the optimizer's step",
    zh="{network} 每步更新 {updates} 次（每个 micro-batch 之后一次）：权重每步只变化一次，因此滑动平均的跟随速度变为 {updates} 倍。请在 optimizer.step() 之后更新",
    lines=(UPDATES, OF_WEIGHTS),
    patch=average_after_the_step,
    broken="""
def update(teacher, model):
    for kept, trained in zip(teacher.parameters(), model.parameters()):
        kept.data.lerp_(trained.data, 0.01)


for x, y in loader:
    for inputs, targets in zip(x.chunk(4), y.chunk(4)):
        (loss_of(model(inputs), targets) / 4).backward()
        update(teacher, model)
    optimizer.step()
    optimizer.zero_grad()
""",
    right="""
def update(teacher, model):
    for kept, trained in zip(teacher.parameters(), model.parameters()):
        kept.data.lerp_(trained.data, 0.01)


for x, y in loader:
    for inputs, targets in zip(x.chunk(4), y.chunk(4)):
        (loss_of(model(inputs), targets) / 4).backward()
    optimizer.step()
    update(teacher, model)
    optimizer.zero_grad()
""",
)
