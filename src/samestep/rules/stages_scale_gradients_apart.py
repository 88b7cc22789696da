from samestep.judge.places import OF_GRADIENTS, PIPELINE_STEP, SCHEDULE
from samestep.rules import Rule

RULE = Rule(
    en="the stages of the pipeline scale their gradients differently: those of stage {stage} are {factor:.6g} times what its ranks computed, and those of stage 0 {first:.6g} times (scale_grads of one schedule, or a loss divided in one place alone)",
    zh="流水线各阶段对梯度的缩放不同：阶段 {stage} 是其 rank 所算梯度的 {factor:.6g} 倍，阶段 0 是 {first:.6g} 倍（某个 schedule 的 scale_grads，或只在一处除以损失的份数）",
    lines=(SCHEDULE, OF_GRADIENTS, PIPELINE_STEP),
    broken="""
schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=F.cross_entropy, scale_grads=is_last_stage)
schedule.step(*inputs, target=y)
""",
    right="""
schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=F.cross_entropy)
schedule.step(*inputs, target=y)
""",
)
