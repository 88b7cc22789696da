from samestep.judge.places import BACKWARD, OF_WEIGHTS, into
from samestep.rules import Rule

RULE = Rule(
    en="the gradient is another one, after steps that are the same to the last bit: something moves the weights between two steps, or the loss or the dropout is another one",
    zh="在逐位相同的几步之后梯度不同：两步之间移动权重的代码、损失或 dropout",
    lines=(OF_WEIGHTS, BACKWARD, into(BACKWARD)),
)
