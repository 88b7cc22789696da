from samestep.judge.places import called
from samestep.rules import Rule

RULE = Rule(
    en="each epoch reads the rows in their own order: set_epoch is called on a sampler that does not shuffle (shuffle=False), where it does nothing. Leave shuffle=False out where the epochs are to be shuffled, or set_epoch where they are not",
    zh="每个 epoch 都按原来的顺序读取数据：对不打乱的 sampler（shuffle=False）调用了 set_epoch，它不起作用。如果需要打乱，请去掉 shuffle=False；如果不需要，请去掉 set_epoch",
    lines=(called("sampler"), called("set_epoch")),
    broken="""
sampler = DistributedSampler(data, shuffle=False)
loader = DataLoader(data, sampler=sampler)
for epoch in range(3):
    sampler.set_epoch(epoch)
""",
    right="""
sampler = DistributedSampler(data)
loader = DataLoader(data, sampler=sampler)
for epoch in range(3):
    sampler.set_epoch(epoch)
""",
)
