from samestep.judge.places import DIVISORS, LOSS, OF_RANKS, called
from samestep.rules import Rule

RULE = Rule(
    en="the ranks' gradient is not that of one process, and the ranks have different numbers of rows or targets, or these numbers are not known. Either a loss is divided by the rank's own number of rows or targets, or by the sum of their weights; or a term of the loss depends on the rank or on the number of ranks",
    zh="各 rank 的梯度不是单进程的梯度，而各 rank 的行数或目标数不同，或不知道有多少。要么损失除以了该 rank 自己的行数、目标数或权重之和；要么损失的某一项依赖于 rank 或 rank 的数量",
    lines=(*OF_RANKS, DIVISORS, called("collective"), *LOSS[3:]),
    broken="""
boxes = torch.tensor(float(sum(len(target["boxes"]) for target in y)))
loss = losses_of(model(x), y).sum() / boxes
loss.backward()
""",
    right="""
boxes = torch.tensor(float(sum(len(target["boxes"]) for target in y)))
dist.all_reduce(boxes)
loss = losses_of(model(x), y).sum() / boxes * world
loss.backward()
""",
)
