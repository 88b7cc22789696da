from samestep.rules import Rule

RULE = Rule(
    en="epoch {epoch} begins anew: its batches before the checkpoint are not skipped",
    zh="epoch {epoch} 重新开始：检查点之前的批次没有跳过",
    broken="""
state = torch.load("checkpoint.pt")
for epoch in range(state["epoch"], epochs):
    sampler.set_epoch(epoch)
    for i, (x, y) in enumerate(loader):
        train(x, y)
""",
    right="""
state = torch.load("checkpoint.pt")
for epoch in range(state["epoch"], epochs):
    sampler.set_epoch(epoch)
    for i, (x, y) in enumerate(loader):
        if epoch > state["epoch"] or i >= state["batches"]:
            train(x, y)
""",
)
