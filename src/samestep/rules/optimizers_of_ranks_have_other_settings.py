from samestep.judge.places import called, flowing
from samestep.judge.source import RANK
from samestep.rules import Rule

RULE = Rule(
    en="rank {rank} steps with another {setting} than rank 0: ranks that step apart then go other ways for the same rows",
    zh="rank {rank} 的优化器使用与 rank 0 不同的 {setting}：各 rank 分别更新时，相同的数据行会得到不同的变化",
    lines=(flowing(called("optimizer"), RANK), called("optimizer")),
    broken="""
outer = SGD(params, lr=0.7, momentum=0.9 if rank == 0 else 0.0)
""",
    right="""
outer = SGD(params, lr=0.7, momentum=0.9)
""",
)
