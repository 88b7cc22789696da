from samestep.judge.places import OF_GRADIENTS, flowing
from samestep.rules import Rule

RULE = Rule(
    en="the ranks compute the gradient of one process, and the script's own code between backward() and step() makes another one of it than in one process: it depends on the number of ranks",
    zh="各 rank 算出的梯度与单进程相同，但脚本在 backward() 与 step() 之间自己编写的代码把它变成了与单进程不同的梯度：这段代码依赖于 rank 的数量",
    lines=(flowing(OF_GRADIENTS), OF_GRADIENTS),
    broken="""
loss.backward()
for p in model.parameters():
    p.grad.clamp_(-0.1 / world, 0.1 / world)
optimizer.step()
""",
    right="""
loss.backward()
for p in model.parameters():
    p.grad.clamp_(-0.1, 0.1)
optimizer.step()
""",
)
