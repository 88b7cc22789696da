from samestep.judge.places import buffer
from samestep.rules import Rule

RULE = Rule(
    en="{buffer} is not the same on all ranks from step {step} on: each rank writes its own rows into a part of this queue or memory bank. Gather the rows of all ranks before writing them, for example with all_gather",
    zh="从第 {step} 步起 {buffer} 在各 rank 上不同：每个 rank 把自己的数据行写入其中一部分（队列、memory bank）。写入之前请用 all_gather 收集所有 rank 的数据行",
    lines=(buffer,),
    broken="""
net.queue[place : place + len(keys)] = keys
""",
    right="""
parts = [torch.empty_like(keys) for _ in range(world)]
dist.all_gather(parts, keys)
net.queue[place : place + world * len(keys)] = torch.cat(parts)
""",
)
