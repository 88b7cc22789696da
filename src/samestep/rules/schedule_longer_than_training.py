from samestep.rules import Rule

RULE = Rule(
    en="the schedule is longer than the training: it ends after {length} calls of step(), but the loops around it make {advances}, so the rate has come only part of its way when the training ends. Count the calls that advance it: optimizer steps, not rows, micro-batches or the batches of all ranks",
    zh="调度器比训练更长：它在 {length} 次 step() 之后才结束，而外层循环只会调用 {advances} 次，训练结束时学习率只走完一部分。请按推进它的次数计数：优化器步数，而不是样本数、micro-batch 数或所有 rank 的 batch 数",
    broken="""
loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
scheduler = CosineAnnealingLR(optimizer, T_max=epochs * len(data))
""",
    right="""
loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
scheduler = CosineAnnealingLR(optimizer, T_max=epochs * len(loader))
""",
)
