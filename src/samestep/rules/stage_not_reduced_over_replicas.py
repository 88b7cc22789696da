from samestep.judge.places import OF_GRADIENTS, PIPELINE_STEP, REDUCTION, SCHEDULE, STAGE, called
from samestep.rules import Rule

RULE = Rule(
    en="stage {stage} is not reduced along the data axis: {wrong} of {parameters:n parameter} have the gradient of one of {replicas:n replica} alone. Reduce each stage over the ranks that hold it; DistributedDataParallel around a stage does not reduce in every schedule (pytorch#144530)",
    zh="阶段 {stage} 没有沿数据轴归约：{parameters} 个参数中有 {wrong} 个只有 {replicas} 个副本之一的梯度。请在持有该阶段的各 rank 之间归约；在某些 schedule 中，包住阶段的 DistributedDataParallel 不会归约（pytorch#144530）",
    lines=(REDUCTION, called("wrapper"), OF_GRADIENTS, STAGE, SCHEDULE, PIPELINE_STEP),
    broken="""
schedule.step(x, target=y)
optimizer.step()
""",
    right="""
schedule.step(x, target=y)
for p in stage.parameters():
    dist.all_reduce(p.grad, group=same_stage)
    p.grad /= dist.get_world_size(same_stage)
optimizer.step()
""",
)
