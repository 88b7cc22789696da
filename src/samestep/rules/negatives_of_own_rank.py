from samestep.judge.places import FORWARD, GATHER, LOSS, beside
from samestep.judge.source import Source
from samestep.rules import Rule

RULE = Rule(
    en="the loss tells each row apart from the other rows of its batch: a rank takes its own rows alone as negatives, and one process takes those of all {ranks} ranks. Gather the features of all ranks, with their gradient",
    zh="损失把每一行与同一批次中的其他行区分开：各 rank 只用自己的数据行作为负样本，而单进程用全部 {ranks} 个 rank 的数据行；请收集所有 rank 的特征，并保留梯度",
    lines=(beside(FORWARD, Source.uses), GATHER, *LOSS),
    broken="""
features = model(x)
loss = contrast(features, features)
loss.backward()
""",
    right="""
features = model(x)
every = torch.cat(torch.distributed.nn.functional.all_gather(features))
loss = contrast(features, every)
loss.backward()
""",
)
