from samestep.judge.places import AVERAGES, called
from samestep.rules import Rule

RULE = Rule(
    en="the weights with which step {step} begins hold the work of {ranks:ranks} alone: what the other ranks have trained since they stepped apart is lost",
    zh="第 {step} 步开始时的权重只包含 {ranks:ranks} 的训练：其他 rank 自分别更新以来的训练丢失了",
    lines=(called("collective"), *AVERAGES),
    broken="""
dist.broadcast(p.data, src=0)
""",
    right="""
dist.all_reduce(p.data, op=dist.ReduceOp.AVG)
""",
)
