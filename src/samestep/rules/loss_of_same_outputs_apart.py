from samestep.judge.places import LOSS, OF_RANKS, TARGETS, called
from samestep.rules import Rule

RULE = Rule(
    en="the model returns on the ranks together what it returns in one process, but the loss is another one: {found:.6g} on average, {expected:.6g} in one process[[. A term that adds up values has the factor {weight:.4g} on each rank as in one process: the mean over ranks of a sum over rows is 1/{ranks} of the whole sum]]. A term of the loss depends on the rank, on the number of ranks, or on what else is in the batch",
    zh="各 rank 上模型的输出合起来与单进程的相同，由它算出的损失却不同：平均为 {found:.6g}，单进程为 {expected:.6g}[[；某一项对数值求和，在每个 rank 上的系数 {weight:.4g} 与单进程相同：对数据行求和时，各 rank 的平均只是其 1/{ranks}]]：损失的某一项依赖于 rank、rank 的数量，或批次中的其他内容",
    lines=(*OF_RANKS, TARGETS, called("collective"), *LOSS[3:]),
    broken="""
logits = model(x)
loss = F.cross_entropy(logits, y) + 0.1 * logits.square().sum()
loss.backward()
""",
    right="""
logits = model(x)
loss = F.cross_entropy(logits, y) + 0.1 * logits.square().sum(1).mean()
loss.backward()
""",
)
