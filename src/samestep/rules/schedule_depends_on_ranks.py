from samestep.rules import Rule

RULE = Rule(
    en="the schedule depends on the number of ranks: {rate:.6g} at step {step}, where one process has {one_process:.6g}; {why}",
    zh="调度器依赖于 rank 的数量：第 {step} 步为 {rate:.6g}，单进程为 {one_process:.6g}；{why}",
    broken="""
scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / (100 * world)))
""",
    right="""
scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 100))
""",
)
