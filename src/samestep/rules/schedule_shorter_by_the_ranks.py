from samestep.rules import Rule

RULE = Rule(
    en="the schedule runs {ranks} times as fast on {ranks:n rank} as in one process: {rate:.6g} at step {step}, where one process has {one_process:.6g}. The script multiplies the number of batches that a rank has read by the ranks, but the length of the rank's loader counts one rank's batches alone",
    zh="{ranks:n rank} 上的调度速度是单进程的 {ranks} 倍：第 {step} 步为 {rate:.6g}，而单进程为 {one_process:.6g}。脚本把在本 rank 的 DataLoader 中的进度再乘以 rank 数，而该 DataLoader 只含一个 rank 的 batch",
    broken="""
for i, (x, y) in enumerate(loader):
    rows = i * len(x) * world
    group["lr"] = rate * (1 - rows / (len(loader) * len(x)))
""",
    right="""
for i, (x, y) in enumerate(loader):
    rows = i * len(x)
    group["lr"] = rate * (1 - rows / (len(loader) * len(x)))
""",
)
