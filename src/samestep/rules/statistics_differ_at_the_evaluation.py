from samestep.rules import Rule

RULE = Rule(
    en="each rank evaluates with its own BatchNorm statistics ({buffer}): a checkpoint, or rank 0, has the statistics of one rank's rows alone. Use SyncBatchNorm, or average the statistics over the ranks before the evaluation",
    zh="每个 rank 用自己的 BatchNorm 统计量评估（{buffer}）：检查点或 rank 0 只含有一个 rank 的数据的统计量。使用 SyncBatchNorm，或在评估前对各 rank 取平均，可使它们成为同一个模型",
    broken="""
model = DDP(Net())
""",
    right="""
model = DDP(nn.SyncBatchNorm.convert_sync_batchnorm(Net()))
""",
)
