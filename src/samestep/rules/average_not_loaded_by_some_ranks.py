from samestep.judge.places import AVERAGES, LOADS, decided_by_rank
from samestep.rules import Rule

RULE = Rule(
    en="{ranks:ranks} keeps its own weights before step {step}, where other ranks take what all have brought together",
    zh="在第 {step} 步之前，其他 rank 取用合并后的权重，而 {ranks:ranks} 保留自己的权重",
    lines=(decided_by_rank(LOADS), *AVERAGES, LOADS),
    broken="""
if rank == 0:
    model.load_state_dict(mean)
""",
    right="""
model.load_state_dict(mean)
""",
)
