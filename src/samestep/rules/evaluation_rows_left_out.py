from samestep.rules import Rule

RULE = Rule(
    en="{missing} of {rows} evaluated rows {missing:is|are} left out at the end of the ranks' shares: drop_last=True drops each rank's last batch, and a metric of all rows needs these rows",
    zh="{rows} 个评估的数据行中有 {missing} 行在各 rank 份额的末尾被丢弃：drop_last=True 会丢弃每个 rank 的最后一个批次，而全部数据行的指标需要它们",
    broken="""
sampler = DistributedSampler(test, shuffle=False)
test_loader = DataLoader(test, batch_size=8, sampler=sampler, drop_last=True)
""",
    right="""
sampler = DistributedSampler(test, shuffle=False)
test_loader = DataLoader(test, batch_size=8, sampler=sampler)
""",
)
