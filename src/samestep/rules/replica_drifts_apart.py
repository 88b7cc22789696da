from samestep.judge.places import OF_GRADIENTS, OF_RANKS, OF_WEIGHTS, STEP, parameter
from samestep.rules import Rule

RULE = Rule(
    en="the ranks along {axis} hold the same elements, but the step moves them to different values: the ranks' gradients, or what else changes the weights, are not the same",
    zh="沿 {axis} 的各 rank 持有相同的元素，这一步却把它们移到不同的值：它们的梯度，或对权重所做的操作并不相同",
    lines=(*OF_RANKS, OF_GRADIENTS, OF_WEIGHTS, parameter, STEP),
    broken="""
for step, (x, y) in enumerate(loader):
    loss_of(model(x), y).backward()
    optimizer.step()
    noise = torch.randn(64, generator=torch.Generator().manual_seed(rank + step))
    model.norm.weight.data.add_(noise, alpha=0.001)
""",
    right="""
for step, (x, y) in enumerate(loader):
    loss_of(model(x), y).backward()
    optimizer.step()
    noise = torch.randn(64, generator=torch.Generator().manual_seed(step))
    model.norm.weight.data.add_(noise, alpha=0.001)
""",
)
