from samestep.rules import Rule

RULE = Rule(
    en="the schedule is {ranks} times as long on {ranks:n rank} as in one process: {rate:.6g} at step {step}, where one process has {one_process:.6g}. A rank's loader already counts the batches of one rank: multiplied by the ranks, this length is not reached when the training ends",
    zh="在 {ranks} 个 rank 上，调度器的长度是单进程的 {ranks} 倍：第 {step} 步为 {rate:.6g}，单进程为 {one_process:.6g}。每个 rank 的 loader 长度已经只是该 rank 的批次数：再乘以 rank 数，训练结束时调度还没有走完",
    broken="""
scheduler = CosineAnnealingLR(optimizer, T_max=epochs * len(loader) * world)
""",
    right="""
scheduler = CosineAnnealingLR(optimizer, T_max=epochs * len(loader))
""",
)
