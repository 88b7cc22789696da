from samestep.judge.places import OF_GRADIENTS, called, flowing
from samestep.judge.suggested_patches import drop_the_ranks
from samestep.rules import Rule

RULE = Rule(
    en="clipping depends on the number of ranks: the same gradient is clipped to another norm in one process",
    zh="裁剪依赖于 rank 的数量：同一个梯度在单进程中被裁剪到另一个范数",
    lines=(flowing(called("clip")), flowing(OF_GRADIENTS), called("clip"), OF_GRADIENTS),
    patch=drop_the_ranks,
    broken="""
clip_grad_norm_(p, 1.0 / world)
""",
    right="""
clip_grad_norm_(p, 1.0)
""",
)
