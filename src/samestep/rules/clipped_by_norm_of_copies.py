from samestep.judge.places import OF_GRADIENTS, STEP, called, calling
from samestep.rules import Rule

RULE = Rule(
    en="the gradients are clipped to {factor} times those of one process: the norm counts several times what every rank along {axis} holds a copy of, or leaves out pieces that other ranks hold. Add up the squares of the pieces over these ranks, and count each copy once",
    zh="裁剪后的梯度是单进程的 {factor} 倍：计算范数时，沿 {axis} 的每个 rank 都持有副本的参数被重复计入，或漏掉了其他 rank 持有的切片。请在这些 rank 之间累加切片的平方，每个副本只计一次",
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
