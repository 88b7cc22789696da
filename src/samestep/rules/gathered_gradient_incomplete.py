from samestep.judge.places import GATHER, LOSS, beside
from samestep.judge.source import Source
from samestep.rules import Rule

RULE = Rule(
    en="the ranks' losses are that of one process, but their gradient is not: the tensors gathered from the ranks come without their whole gradient (all_gather has no backward, or a backward does not add up what the other ranks computed). Gather by torch.distributed.nn.functional.all_gather",
    zh="各 rank 的损失与单进程相同，梯度却不同：从各 rank 收集来的张量没有梯度（all_gather 返回的张量与计算图断开，或自定义的 backward 没有累加其他 rank 的梯度）；请使用 torch.distributed.nn.functional.all_gather",
    lines=(beside(GATHER, Source.backwards), GATHER, *LOSS),
    broken="""
features = model(x)
parts = [torch.empty_like(features) for _ in range(world)]
dist.all_gather(parts, features)
parts[rank] = features
contrast(torch.cat(parts)).backward()
""",
    right="""
features = model(x)
parts = torch.distributed.nn.functional.all_gather(features)
contrast(torch.cat(parts)).backward()
""",
)
