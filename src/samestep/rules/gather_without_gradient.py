from samestep.judge.places import GATHER
from samestep.rules import Rule

RULE = Rule(
    en="from step {step} on, tensors gathered from {ranks:n rank} enter the loss, but only the rank's own part gets a gradient (all_gather has no backward). The gradients of the other ranks' losses for these features are lost, and the mean over ranks divides what is left. Use torch.distributed.nn.functional.all_gather",
    zh="从第 {step} 步起，从 {ranks} 个 rank 收集的张量进入损失时只有本 rank 的部分带梯度（all_gather 不传递梯度）：其他 rank 的损失对这些特征的梯度丢失，剩下的又被各 rank 平均。请使用 torch.distributed.nn.functional.all_gather",
    lines=(GATHER,),
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
