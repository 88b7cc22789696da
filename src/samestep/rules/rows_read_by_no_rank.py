from samestep.rules import Rule

RULE = Rule(
    en="{missing} of {rows:n row} are read by no rank: the rows are shared out twice, or among more ranks than there are",
    zh="{rows} 行中有 {missing} 行没有任何 rank 读取：数据被分了两次，或者按多于实际的 rank 数量来分",
    broken="""
loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
""",
    right="""
loader = DataLoader(data, batch_size=8, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
""",
)
