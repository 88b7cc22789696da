from samestep.rules import Rule

RULE = Rule(
    en="the schedule is one step behind, or its rate is not set after loading",
    zh="调度器落后一步，或加载之后没有设置学习率",
    broken="""
loss.backward()
optimizer.step()
torch.save({"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}, "checkpoint.pt")
scheduler.step()
""",
    right="""
loss.backward()
optimizer.step()
scheduler.step()
torch.save({"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}, "checkpoint.pt")
""",
)
