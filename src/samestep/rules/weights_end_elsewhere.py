from samestep.judge.places import DECAY_WRITES, STEP, called, flowing
from samestep.rules import Rule

RULE = Rule(
    en="one process ends at other weights, from the same weights, rows and rates: the step itself (clipping, optimizer, weight decay, averaging of weights) depends on the number of ranks",
    zh="从相同的权重、数据行和学习率出发，单进程得到了不同的结果：优化器步本身（裁剪、优化器、权重衰减、权重平均）依赖于 rank 的数量",
    lines=(flowing(DECAY_WRITES), flowing(called("optimizer")), STEP),
    broken="""
optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01 * world)
""",
    right="""
optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
""",
)
