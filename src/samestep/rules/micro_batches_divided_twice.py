from samestep.judge.places import OF_GRADIENTS, PIPELINE_STEP, SCHEDULE
from samestep.rules import Rule

RULE = Rule(
    en="the gradient is 1/{micro_batches} of that of the whole batch: the schedule divides by the {micro_batches} micro-batches (scale_grads), and the loss is divided as well, or is a sum",
    zh="梯度是整个批次的 1/{micro_batches}：schedule 已除以 {micro_batches} 个微批次（scale_grads），损失又除了一次，或者损失是求和",
    lines=(SCHEDULE, OF_GRADIENTS, PIPELINE_STEP),
    broken="""
schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=lambda output, target: F.cross_entropy(output, target) / 4)
""",
    right="""
schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=F.cross_entropy)
""",
)
