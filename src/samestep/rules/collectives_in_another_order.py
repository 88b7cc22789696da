from samestep.judge.places import PARTING, around, called
from samestep.rules import Rule

RULE = Rule(
    en="the ranks call their collectives in different orders, or with different tensors, so that one rank receives something else than another has sent (a condition on the rank, a set or dict whose order differs, a parameter that one rank leaves out)",
    zh="各 rank 以不同的顺序、或用不同的张量调用集合通信：一个 rank 发送的，另一个 rank 当作别的接收（依赖 rank 的条件、顺序不同的 set 或 dict、某个 rank 漏掉的参数）",
    lines=(around(called("collective")), *PARTING),
    broken="""
for name in set(losses):
    dist.all_reduce(losses[name])
""",
    right="""
for name in sorted(losses):
    dist.all_reduce(losses[name])
""",
)
