from samestep.rules import Rule

RULE = Rule(
    en="what the script reports of an evaluation is {factor:.4g} times what one process reports of all rows, for {ranks} ranks: a sum over all ranks is divided by the number of one rank's rows or batches, or a rank's own by the number of all. Reduce the sum and the number in the same way",
    zh="脚本报告的评估值是单进程对全部数据所得值的 {factor:.4g} 倍（{ranks} 个 rank）：所有 rank 的和除以了一个 rank 的行数或批次数，或者一个 rank 的和除以了全部的数目。请用同样的方式归约和与数目",
    broken="""
dist.all_reduce(correct)
print(correct / len(sampler))
""",
    right="""
dist.all_reduce(correct)
print(correct / len(dataset))
""",
)
