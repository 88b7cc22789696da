from samestep.rules import Rule

RULE = Rule(
    en="the gradient is another one, though it is of the checkpoint's weights and the same rows: random numbers (dropout), or another state of the model or the loss, are not restored",
    zh="从检查点的权重和相同的数据行得到不同的梯度：随机数（dropout），或模型、损失的其他状态没有恢复",
    broken="""
state = torch.load(f"checkpoint-{rank}.pt")
model.load_state_dict(state["model"])
optimizer.load_state_dict(state["optimizer"])
torch.manual_seed(rank)
""",
    right="""
state = torch.load(f"checkpoint-{rank}.pt")
model.load_state_dict(state["model"])
optimizer.load_state_dict(state["optimizer"])
torch.set_rng_state(state["random"])
""",
)
