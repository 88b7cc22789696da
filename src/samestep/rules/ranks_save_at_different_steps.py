from samestep.judge.places import beside, called, decided_by_rank
from samestep.judge.source import Source
from samestep.rules import Rule

RULE = Rule(
    en="the ranks save files of one kind ({file}) at different steps: {ranks:ranks} before step {step}, the others not. These checkpoints do not belong to one state of the training",
    zh="各 rank 在不同的步保存同一类文件（{file}）：{ranks:ranks} 在第 {step} 步之前保存，其他 rank 没有：这些检查点不是同一个训练状态",
    lines=(
        decided_by_rank(called("save")),
        beside(called("save"), Source.conditions),
        called("save"),
    ),
    broken="""
loss = evaluate(model)
if loss < best:
    best = loss
    torch.save(model.state_dict(), f"best-{rank}.pt")
""",
    right="""
loss = evaluate(model)
dist.all_reduce(loss)
if loss < best:
    best = loss
    torch.save(model.state_dict(), f"best-{rank}.pt")
""",
)
