from samestep.rules import Rule

RULE = Rule(
    en="the training began anew: these are its first weights, and no checkpoint was loaded",
    zh="训练重新开始：这是它最初的权重，没有加载检查点",
    broken="""
model = DDP(Net())
if resumed:
    model.load_state_dict(torch.load("checkpoint.pt"), strict=False)
train(model)
torch.save(model.module.state_dict(), "checkpoint.pt")
""",
    right="""
model = DDP(Net())
if resumed:
    model.module.load_state_dict(torch.load("checkpoint.pt"))
train(model)
torch.save(model.module.state_dict(), "checkpoint.pt")
""",
)
