from samestep.judge.places import GATHER, LOADS, REDUCTION, around
from samestep.rules import Rule

RULE = Rule(
    en="buffer {buffer} stays each rank's own where the ranks bring their weights together, and {alike:n other buffer} with them: the average of the weights has statistics that belong to no one model",
    zh="各 rank 合并权重和另外 {alike} 个缓冲区时，缓冲区 {buffer} 仍是各 rank 自己的：平均后的权重所用的统计量不属于同一个模型",
    lines=(around(REDUCTION), REDUCTION, LOADS, GATHER),
    broken="""
mean = {name: average(state[name]) for name in state if "running_var" not in name}
model.load_state_dict(mean, strict=False)
""",
    right="""
mean = {name: average(state[name]) for name in state}
model.load_state_dict(mean)
""",
)
