from samestep.judge.places import BACKWARD, OF_GRADIENTS, REDUCTION, called, calling
from samestep.rules import Rule

RULE = Rule(
    en="no known mistake explains these gradients: those of {wrong} of {parameters:n parameter} are neither the mean over the ranks nor the rank's own gradient",
    zh="没有已知的错误可以解释：{parameters} 个参数中有 {wrong} 个既不是平均梯度，也不是该 rank 自己的梯度",
    lines=(called("clip"), calling(OF_GRADIENTS), REDUCTION, BACKWARD),
)
