from samestep.judge.places import OF_GRADIENTS, PIPELINE_STEP, SCHEDULE
from samestep.rules import Rule

RULE = Rule(
    en="the gradients of stage {stage} add up {calls:n call} of the schedule, and each call divides the gradients of the calls before it by its {micro_batches} micro-batches once more ({wrong} of {parameters:n parameter}): scale_grads divides all that it finds. Make the schedule with scale_grads=False, and divide the loss",
    zh="阶段 {stage} 的梯度是 schedule 的 {calls} 次调用之和，而每次调用都把之前留下的梯度又除以一次它的 {micro_batches} 个微批次（{parameters} 个参数中有 {wrong} 个）：scale_grads 会除以它遇到的一切。请以 scale_grads=False 创建 schedule，并对损失做除法",
    lines=(SCHEDULE, OF_GRADIENTS, PIPELINE_STEP),
    broken="""
schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=F.cross_entropy)
for inputs, targets in zip(x.chunk(2), y.chunk(2)):
    schedule.step(inputs, target=targets)
""",
    right="""
schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=lambda o, t: F.cross_entropy(o, t) / 8, scale_grads=False)
for inputs, targets in zip(x.chunk(2), y.chunk(2)):
    schedule.step(inputs, target=targets)
""",
)
