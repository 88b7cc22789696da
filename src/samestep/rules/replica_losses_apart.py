from samestep.judge.places import LOSS, OF_RANKS, called
from samestep.rules import Rule

RULE = Rule(
    en="the ranks along {axis} have different losses for the same rows ({losses}), and another gradient than one process. A part of the loss is computed from each rank's own piece (of the vocabulary, of the classes) as though that were the whole, or the loss depends on the rank",
    zh="沿 {axis} 的各 rank 对相同的数据行有不同的损失（{losses}），梯度也与一个进程不同：损失的一部分是把各 rank 自己的一块（词表的、类别的）当作整体来计算的，或者损失依赖于 rank",
    lines=(*OF_RANKS, *LOSS[3:], called("collective")),
    broken="""
part = model(x)
log_sum = SumOfRanks.apply(part.exp().sum(-1)).log()
smooth = part.mean(-1) - log_sum
loss = 0.9 * vocabulary_parallel_loss(part, y) - 0.1 * smooth.mean()
loss.backward()
""",
    right="""
part = model(x)
log_sum = SumOfRanks.apply(part.exp().sum(-1)).log()
smooth = SumOfRanks.apply(part.sum(-1)) / (world * part.shape[-1]) - log_sum
loss = 0.9 * vocabulary_parallel_loss(part, y) - 0.1 * smooth.mean()
loss.backward()
""",
)
