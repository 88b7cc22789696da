from samestep.judge.places import beside, called, decided_by_rank
from samestep.judge.source import Source
from samestep.rules import Rule

RULE = Rule(
    en="the ranks evaluate at different steps: {ranks:ranks} before step {step}, the others not. Each rank decides by values of its own (its loss, time or number of batches)",
    zh="各 rank 在不同的步评估：{ranks:ranks} 在第 {step} 步之前评估，其他 rank 没有：各自按自己的信息（自己的损失、时间或批数）决定",
    lines=(
        decided_by_rank(called("evaluation")),
        beside(called("evaluation"), Source.conditions),
        called("evaluation"),
    ),
    broken="""
for step, (x, y) in enumerate(loader):
    train(x, y)
    if time.monotonic() > due:
        evaluate(model)
""",
    right="""
for step, (x, y) in enumerate(loader):
    train(x, y)
    if step % 100 == 0:
        evaluate(model)
""",
)
