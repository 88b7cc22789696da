from samestep.judge.places import FORWARD, module_forward
from samestep.rules import Rule

RULE = Rule(
    en="{module} is the first module that gets other values on the ranks than in one process on the same rows. What the script computes beside the rows (positions that begin anew on each rank, the rank, the number of ranks) is not that of the whole batch",
    zh="{module} 是第一个输入不同的模块：对相同的数据行，它在各 rank 上的输入与单进程的不同：脚本在数据行之外计算的量（在每个 rank 上从头开始的位置、rank、rank 的数量）不是整个批次的",
    lines=(module_forward, FORWARD),
    broken="""
tokens = tokens.chunk(world, dim=1)[rank]
places = torch.arange(tokens.shape[1])
logits = model(tokens, places)
""",
    right="""
tokens = tokens.chunk(world, dim=1)[rank]
places = torch.arange(tokens.shape[1]) + rank * tokens.shape[1]
logits = model(tokens, places)
""",
)
