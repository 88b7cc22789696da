from samestep.judge.places import DIVIDES, SEEDS, flowing, parameter
from samestep.judge.source import RANK
from samestep.rules import Rule

RULE = Rule(
    en="the ranks along {axis} hold the same elements of {different:n parameter}, but begin with different values: they are initialised without a common seed[[, and {plan} sends rank 0's values only for the modules in its plan]]",
    zh="沿 {axis} 的各 rank 持有 {different} 个参数的相同元素，初始值却不同：初始化时没有共同的随机种子[[，而 {plan} 只分发计划中的参数]]",
    lines=(flowing(SEEDS, RANK), SEEDS, parameter, DIVIDES),
    broken="""
torch.manual_seed(rank)
model = parallelize_module(Net(), mesh["tensor"], plan)
""",
    right="""
torch.manual_seed(0)
model = parallelize_module(Net(), mesh["tensor"], plan)
""",
)
