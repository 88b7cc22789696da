from samestep.rules import Rule

RULE = Rule(
    en="the ranks compute gradients, but none of them reaches the optimizer: the gradients are never reduced (a flag that delays the reduction is never set back), or the optimizer holds other tensors than the model",
    zh="各 rank 计算了梯度，但没有一个到达优化器：梯度从未归约（推迟归约的标志没有复位），或者优化器持有的张量不是模型的张量",
    broken="""
for x, y in loader:
    model.set_requires_gradient_sync(False)
    (loss_of(model(x[:8]), y[:8]) / 2).backward()
    (loss_of(model(x[8:]), y[8:]) / 2).backward()
    optimizer.step()
""",
    right="""
for x, y in loader:
    model.set_requires_gradient_sync(False)
    (loss_of(model(x[:8]), y[:8]) / 2).backward()
    model.set_requires_gradient_sync(True)
    (loss_of(model(x[8:]), y[8:]) / 2).backward()
    optimizer.step()
""",
)
