from samestep.rules import Rule

RULE = Rule(
    en="{different} of {parameters:n parameter} are not those after {steps:n step}: they were not saved, not loaded or were rounded, or the number of steps is not the checkpoint's",
    zh="{parameters} 个参数中有 {different} 个不是 {steps} 步之后的值：没有保存或加载、被舍入，或步数与检查点不符",
    broken="""
state = {name: value.half() for name, value in model.state_dict().items()}
torch.save(state, "checkpoint.pt")
""",
    right="""
state = model.state_dict()
torch.save(state, "checkpoint.pt")
""",
)
