from samestep.judge.places import RATE_WRITES, called, flowing
from samestep.judge.source import RANK
from samestep.rules import Rule

RULE = Rule(
    en="the stages step at different learning rates: {rate:.6g} on rank {rank}, {first:.6g} on rank 0",
    zh="各阶段的学习率不同：rank {rank} 为 {rate:.6g}，rank 0 为 {first:.6g}",
    lines=(flowing(called("optimizer"), RANK), called("optimizer"), RATE_WRITES),
    broken="""
optimizer = torch.optim.SGD(stage.parameters(), lr=0.1 if rank == 0 else 0.01)
""",
    right="""
optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
""",
)
