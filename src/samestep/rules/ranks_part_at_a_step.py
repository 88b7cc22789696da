from samestep.rules import Rule

RULE = Rule(
    en="{ranks:ranks} compute forward passes without gradients (rollouts) before different steps, first before step {step}: a rank leaves its loop by its own loss or divergence (early stopping), and its collectives meet those of another step. Reduce the value that decides this over all ranks, as by all_reduce, before it is compared",
    zh="{ranks:ranks} 在不同的步之前做无梯度的前向（采样），最早在第 {step} 步之前：某个 rank 按自己的损失或散度提前离开循环，此后它的集合通信对应的是另一步。请先用 all_reduce 在所有 rank 之间归约，再据此判断",
    broken="""
for x, old in rollouts:
    divergence = (old - chances(model, x)).mean()
    if divergence > limit:
        break
""",
    right="""
for x, old in rollouts:
    divergence = (old - chances(model, x)).mean() / world
    dist.all_reduce(divergence)
    if divergence > limit:
        break
""",
)
