from samestep.proof.script.places import GATHER
from samestep.rules import Rule

RULE = Rule(
    en="what is gathered from {ranks:n rank} enters the loss with a gradient for the rank's own part alone (all_gather hands no gradient on), from step {step} on. The other ranks' losses by these features are left out, and the mean over ranks divides what is left. Use torch.distributed.nn.functional.all_gather",
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
