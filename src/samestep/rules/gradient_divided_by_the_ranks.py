from samestep.judge.places import DIVISORS, LOSS, OF_RANKS, called
from samestep.judge.suggested_patches import drop_the_ranks
from samestep.rules import Rule

RULE = Rule(
    en="the ranks' gradient is 1/{ranks} times that of one process on the same rows. The loss is scaled by the number of ranks or of local rows, or summed over a rank's rows[[; that process is told that there are {told} ranks, because the script fails with one]]",
    zh="在相同的数据行上，各 rank 的梯度是单进程的 1/{ranks}：损失按 rank 数或本地行数缩放，或对一个 rank 的行求和[[；脚本无法作为一个 rank 运行，因此告诉该进程共有 {told} 个 rank]]",
    lines=(*OF_RANKS, DIVISORS, called("collective"), *LOSS[3:]),
    patch=drop_the_ranks,
    broken="""
loss = loss_of(model(x), y) / world
loss.backward()
""",
    right="""
loss = loss_of(model(x), y)
loss.backward()
""",
)
