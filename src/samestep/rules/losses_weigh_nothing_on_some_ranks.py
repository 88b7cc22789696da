from samestep.judge.places import BACKWARD, SKIPPING, decided_by_rank, flowing
from samestep.judge.source import RANK
from samestep.rules import Rule

RULE = Rule(
    en="the losses of {ranks:ranks} are multiplied by zero in this step, but the mean over ranks still divides by the number of all ranks: the other ranks' losses weigh less than one together",
    zh="{ranks:ranks} 在这一步的损失乘以了零，而各 rank 的平均仍除以全部 rank 数：其他 rank 的损失合计权重小于一",
    lines=(decided_by_rank(BACKWARD), flowing(BACKWARD, RANK), *SKIPPING),
    broken="""
for x, y in loader:
    used = torch.tensor(float(is_labelled(y)))
    loss = loss_of(model(x), y) * used
    loss.backward()
""",
    right="""
for x, y in loader:
    used = torch.tensor(float(is_labelled(y)))
    ranks_used = used.clone()
    dist.all_reduce(ranks_used)
    loss = loss_of(model(x), y) * used * world / ranks_used.clamp(min=1)
    loss.backward()
""",
)
