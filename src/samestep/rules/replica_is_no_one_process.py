from samestep.judge.places import DIVIDES, LOSS, OF_RANKS, called
from samestep.rules import Rule

RULE = Rule(
    en="the ranks along {axis} together do not compute what one process computes for the same rows[[: the gradient is {factor:.6g} times as large]]. A piece is missing or counted several times (a plan's layouts, a sum or a bias that each rank adds), or the loss depends on the ranks[[; that process is told that there are {told} ranks, because the script fails with one]]",
    zh="沿 {axis} 的各 rank 合在一起算出的，与单进程对相同数据行算出的不同[[：梯度是其 {factor:.6g} 倍]]：有部分缺失或被重复计算（计划中的布局、每个 rank 都加上的和或偏置），或者损失依赖于各 rank[[；脚本无法作为一个 rank 运行，因此告诉该进程共有 {told} 个 rank]]",
    lines=(*OF_RANKS, DIVIDES, called("collective"), *LOSS[3:]),
    broken="""
plan = {"up": ColwiseParallel(input_layouts=Partial()), "down": RowwiseParallel()}
model = parallelize_module(Net(), mesh["tensor"], plan)
""",
    right="""
plan = {"up": ColwiseParallel(input_layouts=Replicate()), "down": RowwiseParallel()}
model = parallelize_module(Net(), mesh["tensor"], plan)
""",
)
