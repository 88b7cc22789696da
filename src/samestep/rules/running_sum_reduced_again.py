from samestep.rules import Rule

RULE = Rule(
    en="a sum over the evaluated batches is reduced in each batch, though it holds the reduced sum of the batches before, which is added up again on all ranks: what the script reports is not what one process reports of all rows. Reduce the sum once, after the last batch",
    zh="评估时对各批次累加的和在每个批次都做一次归约，而其中已经包含之前批次归约后的和，于是在所有 rank 上被重复相加：脚本报告的值不是单进程对全部数据所得的值。请在最后一个批次之后只归约一次",
    broken="""
for x, y in loader:
    correct += (model(x).argmax(1) == y).sum()
    dist.all_reduce(correct)
""",
    right="""
for x, y in loader:
    correct += (model(x).argmax(1) == y).sum()
dist.all_reduce(correct)
""",
)
