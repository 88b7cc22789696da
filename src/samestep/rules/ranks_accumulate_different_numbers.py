from samestep.judge.places import SKIPPING
from samestep.rules import Rule

RULE = Rule(
    en="the ranks accumulate different numbers of micro-batches in this step ({micro_batches}), and the losses are not divided so that their weights add up to one",
    zh="各 rank 在这一步累积的 micro-batch 数不同（{micro_batches}），而损失没有按总权重为一来除",
    lines=SKIPPING,
    broken="""
kept = [(x, y) for x, y in micro_batches if len(y)]
for x, y in kept:
    (loss_of(model(x), y) / len(micro_batches)).backward()
for p in model.parameters():
    dist.all_reduce(p.grad)
    p.grad /= world
""",
    right="""
kept = [(x, y) for x, y in micro_batches if len(y)]
number = torch.tensor(float(len(kept)))
dist.all_reduce(number)
for x, y in kept:
    (loss_of(model(x), y) / number * world).backward()
for p in model.parameters():
    dist.all_reduce(p.grad)
    p.grad /= world
""",
)
