from samestep.judge.places import DIVIDES, FORWARD, called, written
from samestep.judge.source_search import calls
from samestep.rules import Rule

RULE = Rule(
    en="{elements:n element} of {parameter} {elements:has|have} no gradient on the ranks along {axis}, but {elements:has|have} one in one process; all other gradients are the same. The script takes an index into the whole (a padding token's, a mask's) for an index into each rank's own piece",
    zh="沿 {axis} 的各 rank 上，{parameter} 有 {elements} 个元素没有梯度，而在一个进程中有；其余梯度都相同：某个按整体计数的索引（填充 token 的、掩码的）被当作各 rank 自己那一块的索引",
    lines=(
        written(lambda source: calls(source, "embedding")),
        DIVIDES,
        called("collective"),
        FORWARD,
    ),
    broken="""
first = rank * len(rows)
here = (tokens >= first) & (tokens < first + len(rows))
found = F.embedding((tokens - first).where(here, 0), rows, padding_idx=PADDING)
""",
    right="""
first = rank * len(rows)
here = (tokens >= first) & (tokens < first + len(rows))
padding = PADDING - first if 0 <= PADDING - first < len(rows) else None
found = F.embedding((tokens - first).where(here, 0), rows, padding_idx=padding)
""",
)
