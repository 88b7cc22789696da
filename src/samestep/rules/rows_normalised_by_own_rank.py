from samestep.judge.places import FORWARD, LOSS, beside, into
from samestep.judge.source import Source
from samestep.rules import Rule

RULE = Rule(
    en="the model receives rows that each rank has normalised by the mean and deviation of its own rows; one process normalises them by those of all rows. Add up the sums over the ranks before dividing them",
    zh="模型收到的数据行由各 rank 用自己那部分数据的均值和标准差归一化，而单进程用全部数据行：请先用 all_reduce 汇总各 rank 的和，再做归一化",
    lines=(beside(FORWARD, Source.statistics), into(FORWARD), *LOSS),
    broken="""
for x, y in loader:
    x = (x - x.mean(0)) / x.std(0)
    loss_of(model(x), y).backward()
""",
    right="""
for x, y in loader:
    sums = torch.stack([x.sum(0), x.square().sum(0)])
    dist.all_reduce(sums)
    mean, square = sums / (len(x) * world)
    x = (x - mean) / (square - mean.square()).sqrt()
    loss_of(model(x), y).backward()
""",
)
