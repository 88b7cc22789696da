from samestep.judge.places import GATHER, REDUCTION
from samestep.rules import Rule

RULE = Rule(
    en="what the ranks bring together before step {step} is the sum over {ranks:n rank}, not the mean: the division is missing",
    zh="各 rank 在第 {step} 步之前合并的是 {ranks} 个 rank 的和，而不是平均：少了除法",
    lines=(REDUCTION, GATHER),
    broken="""
dist.all_reduce(p.data)
""",
    right="""
dist.all_reduce(p.data, op=dist.ReduceOp.AVG)
""",
)
