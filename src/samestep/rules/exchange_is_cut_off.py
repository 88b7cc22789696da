from samestep.judge.places import FORWARD, GATHER, called
from samestep.rules import Rule

RULE = Rule(
    en="the output of {operation} along {axis} is cut off from the graph of its input: {parameters:n parameter} that single ranks of {ranks} hold {parameters:takes|take} part in the forward pass, but {parameters:gets|get} no gradient. Use torch.distributed.nn.functional, or an autograd.Function whose backward sends the gradients back",
    zh="沿 {axis} 由 {operation} 传来的张量与计算图断开：{ranks} 个 rank 各自持有的部分中有 {parameters} 个参数参与前向计算，却得不到梯度；请使用 torch.distributed.nn.functional，或在 backward 中把梯度传回的 autograd.Function",
    lines=(called("collective", "all_to_all"), GATHER, called("collective"), FORWARD),
    broken="""
received = torch.empty_like(rows)
dist.all_to_all_single(received, rows)
output = experts(received)
""",
    right="""
received = torch.empty_like(rows)
received = torch.distributed.nn.functional.all_to_all_single(received, rows)
output = experts(received)
""",
)
