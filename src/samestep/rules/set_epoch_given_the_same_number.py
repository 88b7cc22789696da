from samestep.judge.places import called, epochs
from samestep.judge.suggested_patches import pass_the_epoch
from samestep.rules import Rule

RULE = Rule(
    en="each epoch has the same shuffled order: the sampler's set_epoch is given the same number",
    zh="每个 epoch 的打乱顺序都相同：每次传给采样器 set_epoch 的数字相同",
    lines=(called("set_epoch"), epochs),
    patch=pass_the_epoch,
    broken="""
for epoch in range(3):
    sampler.set_epoch(0)
    for x in loader:
        pass
""",
    right="""
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x in loader:
        pass
""",
)
