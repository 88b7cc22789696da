from samestep.rules import Rule

RULE = Rule(
    en="rank {rank} reports {found} of an evaluation of its own rows, and nothing combines the ranks' results; of all rows one process reports {expected}",
    zh="rank {rank} 报告的评估值 {found} 只来自它自己的数据行，各 rank 的结果没有汇总；单进程对全部数据报告的是 {expected}",
    broken="""
print(correct / rows)
""",
    right="""
totals = torch.tensor([correct, rows])
dist.all_reduce(totals)
print(totals[0] / totals[1])
""",
)
