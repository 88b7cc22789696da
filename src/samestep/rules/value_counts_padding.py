from samestep.judge.places import evaluated
from samestep.rules import Rule

RULE = Rule(
    en="what the script reports of an evaluation is not what one process reports of all rows: {twice:n row} {twice:is|are} evaluated twice, as padding that gives each rank an equal share, and {twice:counts|count} twice. Leave them out of what is gathered",
    zh="脚本报告的评估值与单进程对全部数据所得的值不同：为了让各 rank 的份额相等，有 {twice} 行被评估并计算了两次。请从收集的结果中去除这些重复的行",
    lines=(evaluated("sampler"), evaluated("loader")),
    broken="""
val_loader = DataLoader(val, sampler=DistributedSampler(val, shuffle=False))
""",
    right="""
own_rows = Subset(val, range(dist.get_rank(), len(val), dist.get_world_size()))
val_loader = DataLoader(own_rows)
""",
)
