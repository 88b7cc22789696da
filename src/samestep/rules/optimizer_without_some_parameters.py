from samestep.rules import Rule

RULE = Rule(
    en="{still} of {with_gradient:n parameter} with a gradient {still:is|are} in no optimizer and {still:is|are} never updated ({names:first}). Freeze them (requires_grad_(False)) where that is intended, or give them to the optimizer",
    zh="{with_gradient} 个有梯度的参数中，有 {still} 个不在任何优化器中（{names:first}）：它们从未被更新。如果这是有意的，请冻结它们（requires_grad_(False)），否则请把它们交给优化器",
    broken="""
optimizer = torch.optim.SGD(model.body.parameters(), lr=0.1)
""",
    right="""
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
""",
)
