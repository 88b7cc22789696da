from samestep.proof.script.places import OF_GRADIENTS, STEP, called, calling
from samestep.rules import Rule

RULE = Rule(
    en="the gradient is clipped to {factor} of what one process clips it to: the norm does not count each element once along {axis}",
    zh="梯度被裁剪到一个进程裁剪结果的 {factor} 倍：范数沿 {axis} 没有对每个元素恰好计一次",
    lines=(called("clip"), OF_GRADIENTS, calling(OF_GRADIENTS), STEP),
    broken="""
squares = sum(p.grad.square().sum() for p in [*pieces, *copies])
dist.all_reduce(squares, group=tensor)
clip_grads_with_norm_(model.parameters(), 1.0, squares.sqrt())
""",
    right="""
squares = sum(p.grad.square().sum() for p in pieces)
dist.all_reduce(squares, group=tensor)
squares += sum(p.grad.square().sum() for p in copies)
clip_grads_with_norm_(model.parameters(), 1.0, squares.sqrt())
""",
)
