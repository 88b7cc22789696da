from samestep.judge.places import REDUCTION, around, beside, called, parameter
from samestep.judge.source import Source
from samestep.rules import Rule

RULE = Rule(
    en="the reduction leaves out {left_out} of {parameters:n parameter}: each rank keeps its own gradient of them (they are used outside of the wrapped forward, or were added after the model was wrapped)",
    zh="{parameters} 个参数中有 {left_out} 个没有参与归约：每个 rank 保留自己的梯度（在被包装的 forward 之外使用，或在模型被包装之后才加入）",
    lines=(
        beside(REDUCTION, Source.conditions),
        around(REDUCTION),
        parameter,
        called("wrapper"),
    ),
    broken="""
net = Net()
model = DDP(net)
net.head = nn.Linear(16, 4)
""",
    right="""
net = Net()
net.head = nn.Linear(16, 4)
model = DDP(net)
""",
)
