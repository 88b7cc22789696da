from __future__ import annotations

from samestep.judge.edits import call_in
from samestep.judge.places import LOADS, SEEDS, around, called, parameter
from samestep.judge.suggested_patches import Script
from samestep.rules import Rule


def broadcast_weights(script: Script) -> None:
    """Sends rank 0's weights to all ranks once the model is made."""
    statement = script.first("model")
    name = script.name_of(statement)
    wrappers = ("DDP", "DistributedDataParallel", "FSDP")
    if statement and name and not any(call_in(statement, wrapper) for wrapper in wrappers):
        script.edits.insert_after(
            statement,
            f"for tensor in {name}.state_dict().values():",
            "    torch.distributed.broadcast(tensor, 0)",
        )


RULE = Rule(
    en="the ranks begin with different weights ({different} of {parameters:n parameter}): they are initialised without a common seed, and nothing broadcasts rank 0's (DistributedDataParallel does)",
    zh="各 rank 的初始权重不同（{parameters} 个参数中的 {different} 个）：初始化时没有共同的随机种子，也没有广播 rank 0 的权重（DistributedDataParallel 会广播）",
    lines=(
        parameter,
        LOADS,
        around(called("collective", "broadcast")),
        SEEDS,
        called("wrapper"),
    ),
    patch=broadcast_weights,
    broken="""
model = Net()
optimizer = SGD(model.parameters())
""",
    right="""
model = Net()
for tensor in model.state_dict().values():
    torch.distributed.broadcast(tensor, 0)
optimizer = SGD(model.parameters())
""",
)
