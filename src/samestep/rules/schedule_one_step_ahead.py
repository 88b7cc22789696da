from samestep.rules import Rule

RULE = Rule(
    en="the schedule is one step ahead: it is advanced once more when it is loaded",
    zh="调度器超前一步：加载时又前进了一次",
    broken="""
optimizer.load_state_dict(state["optimizer"])
scheduler.load_state_dict(state["scheduler"])
scheduler.step()
""",
    right="""
optimizer.load_state_dict(state["optimizer"])
scheduler.load_state_dict(state["scheduler"])
""",
)
