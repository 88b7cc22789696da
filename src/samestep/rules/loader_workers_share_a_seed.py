from samestep.judge.places import SEEDS, called
from samestep.rules import Rule

RULE = Rule(
    en="the loader workers begin with the same seed on all ranks, so that random augmentation repeats over the ranks",
    zh="所有 rank 的 DataLoader worker 从同一个种子开始，随机增强会在各 rank 上重复",
    lines=(called("loader"), SEEDS),
    broken="""
torch.manual_seed(0)
model = DDP(Net())
loader = DataLoader(augmented, sampler=sampler, num_workers=2)
""",
    right="""
torch.manual_seed(0)
model = DDP(Net())
loader = DataLoader(augmented, sampler=sampler, num_workers=2, generator=torch.Generator().manual_seed(rank))
""",
)
