from samestep.judge.places import BACKWARD, OF_GRADIENTS, REDUCTION, calling
from samestep.rules import Rule

RULE = Rule(
    en="rank {rank} steps with the gradient of {ranks:ranks} alone, of {size}: the reduction leaves the others out (another process group, or a broadcast in place of a reduction)",
    zh="rank {rank} 更新所用的梯度只来自 {ranks:ranks}（共 {size} 个 rank）：归约漏掉了其他 rank（用了另一个进程组，或以 broadcast 代替归约）",
    lines=(calling(OF_GRADIENTS), REDUCTION, OF_GRADIENTS, BACKWARD),
    broken="""
loss.backward()
for p in model.parameters():
    dist.broadcast(p.grad, 0)
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
