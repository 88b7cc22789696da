from samestep.rules import Rule

RULE = Rule(
    en="the schedule's length is counted in batches of a rank, or in samples over ranks",
    zh="它的长度按一个 rank 的批次，或按所有 rank 的样本数计算",
)
