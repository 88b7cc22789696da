from samestep.judge.places import BACKWARD, FORWARD, into
from samestep.rules import Rule

RULE = Rule(
    en="the losses of micro-batches {undivided} of {micro_batches} are not divided by {micro_batches}, and the others are: the undivided losses weigh {micro_batches} times as much",
    zh="{micro_batches} 个 micro-batch 中第 {undivided} 个的损失没有除以 {micro_batches}，而其余的除了：前者的权重是后者的 {micro_batches} 倍",
    lines=(into(BACKWARD), BACKWARD, FORWARD),
    broken="""
for i, (x, y) in enumerate(micro_batches):
    if i < 3:
        with model.no_sync():
            (loss_of(model(x), y) / 4).backward()
    else:
        loss_of(model(x), y).backward()
""",
    right="""
for i, (x, y) in enumerate(micro_batches):
    if i < 3:
        with model.no_sync():
            (loss_of(model(x), y) / 4).backward()
    else:
        (loss_of(model(x), y) / 4).backward()
""",
)
