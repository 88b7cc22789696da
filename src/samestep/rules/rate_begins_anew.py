from samestep.rules import Rule

RULE = Rule(
    en="the learning rate begins anew: the schedule's state, or that of the optimizer's groups, is not restored",
    zh="学习率重新开始：调度器的状态，或优化器参数组的状态没有恢复",
    broken="""
state = torch.load("checkpoint.pt")
optimizer.load_state_dict(state["optimizer"])
scheduler = LambdaLR(optimizer, rate_at)
""",
    right="""
state = torch.load("checkpoint.pt")
scheduler = LambdaLR(optimizer, rate_at)
optimizer.load_state_dict(state["optimizer"])
scheduler.load_state_dict(state["scheduler"])
""",
)
