from samestep.judge.suggested_patches import call_set_epoch
from samestep.rules import Rule

RULE = Rule(
    en="set_epoch has not been called; without it each epoch has the same order",
    zh="还没有调用 set_epoch；不调用它，每个 epoch 的顺序都相同",
    patch=call_set_epoch,
    broken="""
loader = DataLoader(data, sampler=DistributedSampler(data))
for epoch in range(3):
    for x, y in loader:
        loss_of(model(x), y).backward()
""",
    right="""
loader = DataLoader(data, sampler=DistributedSampler(data))
for epoch in range(3):
    loader.sampler.set_epoch(epoch)
    for x, y in loader:
        loss_of(model(x), y).backward()
""",
)
