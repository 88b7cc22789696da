from samestep.rules import Rule

RULE = Rule(
    en="what the script reports of an evaluation is not what one process reports of all rows, with the same weights: the ranks' results are combined otherwise than by adding up sums over rows, or by gathering rows",
    zh="在相同权重下，脚本报告的评估值不是单进程对全部数据所得的值：各 rank 的结果不是通过对各行求和或收集各行的方式合并的",
    broken="""
value = correct / rows
dist.all_reduce(value, dist.ReduceOp.MAX)
""",
    right="""
totals = torch.stack([correct, rows])
dist.all_reduce(totals)
value = totals[0] / totals[1]
""",
)
