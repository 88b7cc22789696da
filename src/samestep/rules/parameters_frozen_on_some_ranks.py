from samestep.judge.places import FREEZING
from samestep.rules import Rule

RULE = Rule(
    en="{frozen:n parameter} {frozen:is|are} frozen on {ranks:ranks}, and trained on the others: freeze on all ranks, or on none",
    zh="{frozen} 个参数在 {ranks:ranks} 上被冻结，而在其他 rank 上训练：请在所有 rank 上冻结，或都不冻结",
    lines=FREEZING,
    broken="""
if rank == 0:
    net.body.requires_grad_(False)
model = DDP(net)
""",
    right="""
net.body.requires_grad_(False)
model = DDP(net)
""",
)
