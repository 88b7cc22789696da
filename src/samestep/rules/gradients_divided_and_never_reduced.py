from samestep.judge.places import BACKWARD, READS, STEP
from samestep.rules import Rule

RULE = Rule(
    en="the gradients are divided by the {ranks:n rank}, but never reduced: each rank steps with a fraction of its own gradient (the all-reduce is left out, or its group has one rank)",
    zh="梯度除以了 {ranks} 个 rank，却从未归约：每个 rank 用自己梯度的一部分更新（all-reduce 的进程组只有一个 rank，或漏掉了 all-reduce）",
    lines=(READS, BACKWARD, STEP),
    broken="""
loss.backward()
for p in model.parameters():
    p.grad /= world
optimizer.step()
""",
    right="""
loss.backward()
for p in model.parameters():
    dist.all_reduce(p.grad)
    p.grad /= world
optimizer.step()
""",
)
