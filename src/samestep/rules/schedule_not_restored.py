from samestep.rules import Rule

RULE = Rule(
    en="the schedule's state, or what it counts (the total of steps), is not restored",
    zh="调度器的状态，或它计数的内容（总步数）没有恢复",
    broken="""
state = torch.load("checkpoint.pt")
scheduler = LambdaLR(optimizer, rate_at)
optimizer.load_state_dict(state["optimizer"])
""",
    right="""
state = torch.load("checkpoint.pt")
scheduler = LambdaLR(optimizer, rate_at)
optimizer.load_state_dict(state["optimizer"])
scheduler.load_state_dict(state["scheduler"])
""",
)
