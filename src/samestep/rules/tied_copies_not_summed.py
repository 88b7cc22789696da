from samestep.judge.places import OF_GRADIENTS, PIPELINE_STEP, REDUCTION, STEP
from samestep.rules import Rule

RULE = Rule(
    en="{names} are one weight, held by several stages, and each has the gradient of its own stage alone: the copies come apart. Add their gradients up over the ranks that hold a copy, before the step",
    zh="{names} 是由几个阶段各持一份的同一个权重，而每一份只有自己阶段的梯度：各份会逐渐不同。请在更新之前，在持有副本的 rank 之间把它们的梯度相加",
    lines=(REDUCTION, OF_GRADIENTS, PIPELINE_STEP, STEP),
    broken="""
schedule.step(x, target=y)
optimizer.step()
""",
    right="""
schedule.step(x, target=y)
dist.all_reduce(embedding.weight.grad, group=first_and_last_stage)
optimizer.step()
""",
)
