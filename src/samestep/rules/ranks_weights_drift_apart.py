from samestep.rules import Rule

RULE = Rule(
    en="the ranks' weights have drifted apart ({different} of {parameters:n parameter}): a rank changes its weights by a step, a clipping, a copy or an initialisation that others do not make",
    zh="各 rank 的权重已经不同（{parameters} 个参数中的 {different} 个）：某个 rank 单独改变了权重，执行了其他 rank 没有的步、复制或初始化",
    broken="""
loss.backward()
if rank == 0:
    optimizer.step()
""",
    right="""
loss.backward()
optimizer.step()
""",
)
