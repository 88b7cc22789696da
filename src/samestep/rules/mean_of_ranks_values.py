from samestep.rules import Rule

RULE = Rule(
    en="what the script reports is the mean of what each rank computed of its own rows ({values}); computed of all rows it is {whole}. Gather the outputs and targets of all ranks and compute it once, or reduce the sums that it is made of",
    zh="脚本报告的是各 rank 对自己那部分数据所得值的平均（{values}）；对全部数据计算的值是 {whole}。请先收集所有 rank 的输出与标签再计算一次，或者归约构成该值的各个和",
    broken="""
value = roc_auc(scores, targets)
dist.all_reduce(value)
print(value / dist.get_world_size())
""",
    right="""
all_scores = [torch.empty_like(scores) for _ in range(dist.get_world_size())]
all_targets = [torch.empty_like(targets) for _ in range(dist.get_world_size())]
dist.all_gather(all_scores, scores)
dist.all_gather(all_targets, targets)
print(roc_auc(torch.cat(all_scores), torch.cat(all_targets)))
""",
)
