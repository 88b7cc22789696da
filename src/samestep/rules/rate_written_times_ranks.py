from samestep.rules import Rule

RULE = Rule(
    en="the learning rate is written as a multiple of the number of ranks: {rate:.6g} at the first step on {ranks:n rank}. Even if that is intended (a rate that grows with the batch of all ranks), the training is not that of one process on the same batch",
    zh="学习率写成了 rank 数的倍数：{ranks:n rank} 上第一步为 {rate:.6g}。如果这是有意的（学习率随全局 batch 增大），那么它就不是同样 batch 的单进程训练",
    broken="""
for group in optimizer.param_groups:
    group["lr"] = 0.1 * world * min(1.0, step / 100)
""",
    right="""
for group in optimizer.param_groups:
    group["lr"] = 0.1 * min(1.0, step / 100)
""",
)
