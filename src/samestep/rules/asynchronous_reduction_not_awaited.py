from samestep.judge.places import OF_GRADIENTS, REDUCTION, STEP, WAITS
from samestep.rules import Rule

RULE = Rule(
    en="{reductions:n reduction} with async_op=True {reductions:is|are} not awaited: gradients are changed, or the step takes them, before their reduction has ended; call wait() of its handle first",
    zh="{reductions} 个 async_op=True 的归约没有等待：在归约结束之前，梯度就被修改或被优化器使用；请先调用其 handle 的 wait()",
    lines=(OF_GRADIENTS, WAITS, REDUCTION, STEP),
    broken="""
loss.backward()
works = [dist.all_reduce(p.grad, async_op=True) for p in model.parameters()]
for p in model.parameters():
    p.grad /= world
optimizer.step()
""",
    right="""
loss.backward()
works = [dist.all_reduce(p.grad, async_op=True) for p in model.parameters()]
for p, work in zip(model.parameters(), works):
    work.wait()
    p.grad /= world
optimizer.step()
""",
)
