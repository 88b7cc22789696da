from samestep.judge.places import called
from samestep.rules import Rule

RULE = Rule(
    en="the optimizers of the stages have different settings: {setting} is {found} on rank {rank}, and {first} on rank 0",
    zh="各阶段的优化器设置不同：{setting} 在 rank {rank} 上为 {found}，在 rank 0 上为 {first}",
    lines=(called("optimizer"),),
    broken="""
optimizer = torch.optim.SGD(stage.parameters(), lr=0.1, momentum=0.9 if rank == 0 else 0.0)
""",
    right="""
optimizer = torch.optim.SGD(stage.parameters(), lr=0.1, momentum=0.9)
""",
)
