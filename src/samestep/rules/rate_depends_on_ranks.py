from samestep.judge.suggested_patches import drop_the_ranks
from samestep.rules import Rule

RULE = Rule(
    en="the learning rate depends on the number of ranks: {rate:.6g} on {ranks}, {one_process:.6g} on one. Even if that is intended (a rate that grows with the batch), the ranks do not train as one process does[[; that process is told that there are {told} ranks, because the script fails with one]]",
    zh="学习率依赖于 rank 的数量：{ranks} 个 rank 时为 {rate:.6g}，一个时为 {one_process:.6g}。如果这是有意的（学习率随批次增大），则各 rank 的训练与单进程不同[[；脚本无法作为一个 rank 运行，因此告诉该进程共有 {told} 个 rank]]",
    patch=drop_the_ranks,
    broken="""
rate = 0.1 * world
optimizer = SGD(parameters, lr=rate)
""",
    right="""
rate = 0.1
optimizer = SGD(parameters, lr=rate)
""",
)
