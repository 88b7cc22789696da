from samestep.judge.places import called, epochs
from samestep.judge.suggested_patches import call_set_epoch
from samestep.rules import Rule

RULE = Rule(
    en="each epoch has the same shuffled order: the sampler's set_epoch is never called; call sampler.set_epoch(epoch) before each epoch",
    zh="每个 epoch 的打乱顺序都相同：从未调用采样器的 set_epoch；请在每个 epoch 之前调用 sampler.set_epoch(epoch)",
    lines=(epochs, called("sampler")),
    patch=call_set_epoch,
    broken="""
sampler = DistributedSampler(data)
loader = DataLoader(data, sampler=sampler)
for epoch in range(3):
    for i, (x, y) in enumerate(loader):
        loss = loss_of(model(x), y)
        pass
""",
    right="""
sampler = DistributedSampler(data)
loader = DataLoader(data, sampler=sampler)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for i, (x, y) in enumerate(loader):
        loss = loss_of(model(x), y)
        pass
""",
)
