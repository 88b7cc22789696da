from samestep.judge.places import OF_GRADIENTS, PIPELINE_STEP, REDUCTION
from samestep.rules import Rule

RULE = Rule(
    en="the gradients of stage {stage} are not those of the whole model: {wrong} of {parameters:n parameter} differ, {parameter} by {distance:.3g} of its size. No known mistake explains the difference",
    zh="阶段 {stage} 的梯度不是整个模型的梯度：{parameters} 个参数中有 {wrong} 个，{parameter} 相差其大小的 {distance:.3g}；没有已知的错误可以解释",
    lines=(OF_GRADIENTS, REDUCTION, PIPELINE_STEP),
)
