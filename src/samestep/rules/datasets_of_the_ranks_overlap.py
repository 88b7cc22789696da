from samestep.rules import Rule

RULE = Rule(
    en="the ranks' datasets differ, but share rows: each rank splits, shuffles or filters the data by its own random numbers (random_split without a common generator)",
    zh="每个 rank 的数据集不同，却含有其他 rank 的数据行：它用自己的随机数切分、打乱或过滤数据（random_split 没有共同的 generator）",
    broken="""
train, test = random_split(data, [0.9, 0.1])
loader = DataLoader(train, sampler=DistributedSampler(train))
""",
    right="""
train, test = random_split(data, [0.9, 0.1], generator=torch.Generator().manual_seed(0))
loader = DataLoader(train, sampler=DistributedSampler(train))
""",
)
