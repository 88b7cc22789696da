from samestep.judge.places import SKIPPING
from samestep.rules import Rule

RULE = Rule(
    en="the ranks train different numbers of micro-batches in this step ({micro_batches}): a rank skips a batch by itself, or has fewer, and its other targets weigh more than those of the other ranks. Skip it on all ranks, or divide the sum of losses by the number of targets on all ranks",
    zh="各 rank 在这一步训练的 micro-batch 数不同（{micro_batches}）：某个 rank 自己跳过了一个批次，或批次更少，其余目标的权重比其他 rank 的大；请在所有 rank 上一起跳过，或用损失之和除以所有 rank 上的目标总数",
    lines=SKIPPING,
    broken="""
kept = [(x, y) for x, y in micro_batches if len(y)]
for x, y in kept:
    (loss_of(model(x), y) / len(kept)).backward()
for p in model.parameters():
    dist.all_reduce(p.grad)
    p.grad /= world
""",
    right="""
kept = [(x, y) for x, y in micro_batches if len(y)]
targets = torch.tensor(float(sum(len(y) for _, y in kept)))
dist.all_reduce(targets)
for x, y in kept:
    (loss_of(model(x), y) * len(y) / targets * world).backward()
for p in model.parameters():
    dist.all_reduce(p.grad)
    p.grad /= world
""",
)
