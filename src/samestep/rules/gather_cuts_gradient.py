from samestep.judge.places import GATHER
from samestep.rules import Rule

RULE = Rule(
    en="the ranks' losses are that of one process, but their gradient is not: the gathered tensors come without a gradient (all_gather, all_to_all and reduce_scatter of torch.distributed have no backward). Gather by torch.distributed.nn.functional, or by a function with a backward; write detach() where no gradient is meant",
    zh="各 rank 的损失与单进程相同，梯度却不同：带梯度的张量在收集时丢失了梯度（torch.distributed 的 all_gather、all_to_all、reduce_scatter 不回传梯度）。请使用 torch.distributed.nn.functional，或带 backward 的函数；若本来不需要梯度，请写 detach()",
    lines=(GATHER,),
    broken="""
parts = [torch.empty_like(hidden) for _ in range(world)]
dist.all_gather(parts, hidden)
logits = head(torch.cat(parts, dim=1))
""",
    right="""
parts = torch.distributed.nn.functional.all_gather(hidden)
logits = head(torch.cat(parts, dim=1))
""",
)
