from samestep.rules import Rule

RULE = Rule(
    en="{ranks:ranks} computed a gradient that is NaN or infinite at step {step}, the others did not, and the optimizer steps with it. Look at the rows of that rank (a mean over nothing, a logarithm of zero), or skip the step on all ranks together",
    zh="第 {step} 步 {ranks:ranks} 算出的梯度是 NaN 或无穷大，其他 rank 没有，而这一步仍然用它更新：请检查该 rank 的数据行（对空集取平均、对零取对数），或让所有 rank 一起跳过这一步",
    broken="""
loss.backward()
optimizer.step()
""",
    right="""
loss.backward()
bad = torch.tensor(float(any(not p.grad.isfinite().all() for p in model.parameters())))
dist.all_reduce(bad)
if not bad:
    optimizer.step()
""",
)
