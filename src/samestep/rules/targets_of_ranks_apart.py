from samestep.judge.places import LOSS, TARGETS
from samestep.rules import Rule

RULE = Rule(
    en="the losses of the {ranks} ranks together are of {found:n target}, and the loss of one process is of {expected}, though the model returns the same. Labels are shifted, cut or masked in each rank's own part (shift them before the rows or the sequence are shared out)",
    zh="{ranks} 个 rank 的损失合起来有 {found} 个目标，单进程对相同的数据行有 {expected} 个，而模型的输出相同：标签在各 rank 自己的部分里被移位、截断或屏蔽（应在分配数据行或序列之前移位）",
    lines=(TARGETS, *LOSS),
    broken="""
part = tokens.chunk(world, dim=1)[rank]
inputs, labels = part[:, :-1], part[:, 1:]
loss = loss_of(model(inputs), labels)
loss.backward()
""",
    right="""
inputs = tokens[:, :-1].chunk(world, dim=1)[rank]
labels = tokens[:, 1:].chunk(world, dim=1)[rank]
loss = loss_of(model(inputs), labels)
loss.backward()
""",
)
