from samestep.judge.places import called, epochs
from samestep.rules import Rule

RULE = Rule(
    en="only one of the two sides calls set_epoch: later epochs have another order",
    zh="只有一侧调用了 set_epoch：之后各 epoch 的顺序不同",
    lines=(called("set_epoch"), epochs, called("sampler")),
    broken="""
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
for epoch in range(3):
    for x, y in loader:
        train(x, y)
""",
    right="""
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        train(x, y)
""",
)
