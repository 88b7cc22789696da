from samestep.rules import Rule

RULE = Rule(
    en="the ranks call the optimizer's closure different numbers of times at step {step} ({calls}): LBFGS and its line search do so where each rank decides by its own loss. The gradient of one call is then averaged with that of another call. Return the mean over ranks from the closure (all_reduce the loss)",
    zh="各 rank 在第 {step} 步调用优化器 closure 的次数不同（{calls}）：LBFGS 及其线搜索在每个 rank 只看自己的损失时就会这样，于是一次调用的梯度与另一次调用的梯度被平均；请让 closure 返回所有 rank 的平均损失（对损失做 all_reduce）",
    broken="""
def closure():
    optimizer.zero_grad()
    loss = loss_of(model(x), y)
    loss.backward()
    return loss


optimizer.step(closure)
""",
    right="""
def closure():
    optimizer.zero_grad()
    loss = loss_of(model(x), y)
    loss.backward()
    mean = loss.detach() / world
    dist.all_reduce(mean)
    return mean


optimizer.step(closure)
""",
)
