from samestep.rules import Rule

RULE = Rule(
    en="{ranks:ranks} computed {forwards} {forwards:forward pass|forward passes} of training batches for step {step}, the others {fewer}. A rank skips a batch by itself (a loss that is not finite, a condition on its rows), and from there on its collectives meet those of another batch. Reduce the condition over all ranks first",
    zh="{ranks:ranks} 在第 {step} 步计算了 {forwards} 次训练批次的前向，其他 rank 为 {fewer} 次：某个 rank 自己跳过了一个批次（损失非有限，或取决于其数据行的条件），此后它的集合通信对应的是其他 rank 的另一个批次。请先在所有 rank 之间归约该条件",
    broken="""
for x, y in loader:
    loss = loss_of(model(x), y)
    if not loss.isfinite():
        continue
    loss.backward()
""",
    right="""
for x, y in loader:
    loss = loss_of(model(x), y)
    bad = (~loss.isfinite()).float()
    dist.all_reduce(bad)
    if bad:
        continue
    loss.backward()
""",
)
