from samestep.rules import Rule

RULE = Rule(
    en="the rows of step {step} are read in the order of epoch {found} in place of that of epoch {expected}: the sampler's epoch or random state is not restored",
    zh="第 {step} 步的数据行：是 epoch {found} 的顺序，而不是 epoch {expected} 的：采样器的 epoch 或随机状态没有恢复",
    broken="""
state = torch.load("checkpoint.pt")
for epoch in range(epochs - state["epoch"]):
    sampler.set_epoch(epoch)
    for x, y in loader:
        train(x, y)
""",
    right="""
state = torch.load("checkpoint.pt")
for epoch in range(state["epoch"], epochs):
    sampler.set_epoch(epoch)
    for x, y in loader:
        train(x, y)
""",
)
