from samestep.judge.places import SEEDS, STAGE, parameter
from samestep.rules import Rule

RULE = Rule(
    en="the ranks cut their stages out of different models: rank {rank} has made a model with other weights than rank 0 ({different:n parameter}). Give all ranks one seed, or one checkpoint",
    zh="各 rank 从不同的模型中切出自己的阶段：rank {rank} 建立的模型与 rank 0 的权重不同（{different} 个参数）。请让所有 rank 使用同一个种子，或同一个检查点",
    lines=(SEEDS, parameter, STAGE),
    broken="""
torch.manual_seed(rank)
blocks = Net().blocks
stage = PipelineStage(blocks[rank], rank, world, device)
""",
    right="""
torch.manual_seed(0)
blocks = Net().blocks
stage = PipelineStage(blocks[rank], rank, world, device)
""",
)
