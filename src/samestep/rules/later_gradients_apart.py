from samestep.judge.places import LOSS, OF_RANKS, REDUCTION, beside, called
from samestep.judge.source import Source
from samestep.rules import Rule

RULE = Rule(
    en="the gradients of the earlier steps are those of one process, and all ranks have the same number of rows: the step itself (clipping, optimizer, weight decay, averaging of weights) depends on the number of ranks",
    zh="之前各步的梯度与单进程相同，各 rank 的行数也相同：优化器步本身（裁剪、优化器、权重衰减、权重平均）依赖于 rank 的数量",
    lines=(*OF_RANKS, REDUCTION, beside(REDUCTION, Source.uses), called("collective"), *LOSS[3:]),
)
