from samestep.rules import Rule

RULE = Rule(
    en="at step {step} the closure's last gradient differs from that of one process, in {parameter} by {distance:.0e} of its size: after {calls} calls inside of one step, rounding cannot be told from a mistake",
    zh="第 {step} 步 closure 最后一次的梯度不同（{parameter} 相差 {distance:.0e}）：一步内调用了 {calls} 次之后，无法区分舍入误差和错误",
)
