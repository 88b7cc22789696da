from samestep.rules import Rule

RULE = Rule(
    en="from step {step} on the gradient scaler has another factor in one process ({replayed} instead of {recorded}): it skips other steps there, so the gradients are of other weights",
    zh="从第 {step} 步起，梯度缩放器在单个进程中的因子不同（{replayed}，而不是 {recorded}）：它在那里跳过了别的步，梯度属于别的权重",
)
