from samestep.rules import Rule

RULE = Rule(
    en="the mean of the micro-batches' losses, {mean:.6g}, is not the loss of the batch, {whole:.6g}: the micro-batches have unequal numbers of targets, and weigh the same",
    zh="各微批次损失的平均 {mean:.6g} 不是整个批次的损失 {whole:.6g}：它们的目标数不等，却有相同的权重",
    broken="""
def loss_of(output, target):
    return F.cross_entropy(output, target, ignore_index=-100)


schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=loss_of)
for x, y in loader:
    schedule.step(x, target=y)
""",
    right="""
def loss_of(output, target):
    return F.cross_entropy(output, target, ignore_index=-100, reduction="sum") / targets


schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=loss_of, scale_grads=False)
for x, y in loader:
    targets = (y != -100).sum()
    schedule.step(x, target=y)
""",
)
