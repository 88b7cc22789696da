from samestep.rules import Rule

RULE = Rule(
    en="the first step after the checkpoint has the same weights, gradient and rate, but ends at other weights: the optimizer's state (Adam's moments, a momentum, its count of steps) is not restored, or the optimizer has other settings",
    zh="从检查点的权重、相同的梯度和学习率出发，第一步的结果不同：优化器的状态（Adam 的矩、动量、步数）没有恢复，或其设置不同",
    broken="""
optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
state = torch.load("checkpoint.pt")
model.load_state_dict(state["model"])
""",
    right="""
optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
state = torch.load("checkpoint.pt")
model.load_state_dict(state["model"])
optimizer.load_state_dict(state["optimizer"])
""",
)
