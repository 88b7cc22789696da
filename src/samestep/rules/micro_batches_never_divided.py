from samestep.judge.places import OF_GRADIENTS, PIPELINE_STEP, SCHEDULE
from samestep.rules import Rule

RULE = Rule(
    en="the gradient is {micro_batches} times that of the whole batch: the sum over {micro_batches} micro-batches is never divided. Leave scale_grads=True, or divide the loss",
    zh="梯度是整个批次的 {micro_batches} 倍：{micro_batches} 个微批次之和没有除以其个数。请保留 scale_grads=True，或对损失做除法",
    lines=(SCHEDULE, OF_GRADIENTS, PIPELINE_STEP),
    broken="""
schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=F.cross_entropy, scale_grads=False)
""",
    right="""
schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=F.cross_entropy)
""",
)
