from samestep.judge.places import GATHER, REDUCTION, around, parameter
from samestep.rules import Rule

RULE = Rule(
    en="what the ranks bring together before step {step} leaves out {left_out} of {parameters:n parameter}: each rank keeps its own",
    zh="各 rank 在第 {step} 步之前合并权重时，{parameters} 个参数中有 {left_out} 个没有合并：每个 rank 保留自己的",
    lines=(around(REDUCTION), REDUCTION, GATHER, parameter),
    broken="""
for p in list(model.parameters())[1:]:
    dist.all_reduce(p.data, op=dist.ReduceOp.AVG)
""",
    right="""
for p in model.parameters():
    dist.all_reduce(p.data, op=dist.ReduceOp.AVG)
""",
)
