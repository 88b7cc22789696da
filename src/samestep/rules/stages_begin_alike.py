from samestep.judge.places import SEEDS, STAGE, parameter
from samestep.rules import Rule

RULE = Rule(
    en="stages {first} and {second} begin with the same weights ({parameters:n parameter}): each rank has drawn its own stage from the same seed. One process draws one stage after the other",
    zh="阶段 {first} 与 {second} 的初始权重相同（{parameters} 个参数）：每个 rank 用相同的种子初始化自己的阶段。单进程会依次初始化各阶段",
    lines=(SEEDS, STAGE, parameter),
    broken="""
torch.manual_seed(0)
block = Block()
stage = PipelineStage(block, rank, world, device)
""",
    right="""
torch.manual_seed(0)
block = [Block() for _ in range(world)][rank]
stage = PipelineStage(block, rank, world, device)
""",
)
