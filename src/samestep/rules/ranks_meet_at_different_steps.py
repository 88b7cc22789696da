from samestep.judge.places import GATHER, REDUCTION, STEP, around, written
from samestep.judge.source_search import decisions_by_rank
from samestep.rules import Rule

RULE = Rule(
    en="rank {rank} brings its weights together with the others' before its step {step}, and rank 0 before its step {first}: the ranks count other numbers of steps in between, and what is averaged is of other steps",
    zh="rank {rank} 在自己的第 {step} 步之前合并权重，rank 0 则在第 {first} 步之前：各 rank 之间隔的步数不同，被平均的是不同步的权重",
    lines=(written(decisions_by_rank), around(REDUCTION), REDUCTION, GATHER, STEP),
    broken="""
every = 4 if rank == 0 else 3
if step % every == 0:
    average(model)
""",
    right="""
every = 4
if step % every == 0:
    average(model)
""",
)
