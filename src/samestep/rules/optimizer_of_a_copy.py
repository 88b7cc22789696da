from samestep.rules import Rule

RULE = Rule(
    en="{with_gradient:n parameter} {with_gradient:has|have} a gradient, but no step moves {with_gradient:it|them}: the optimizer holds other tensors than the model, for example because it was made from a copy of the model, or before the model was wrapped or moved",
    zh="{with_gradient} 个参数有梯度，却从未被任何一步更新：优化器持有的张量不是模型的张量，例如优化器是用模型的副本、或在模型被包装或移动之前创建的",
    broken="""
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
fully_shard(model)
""",
    right="""
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
""",
)
