from samestep.rules import Rule

RULE = Rule(
    en="from step {step} on the gradients are {factor:.6g} times the whole model's: the script clips them with code of its own, whose limit is not known",
    zh="从第 {step} 步起，梯度是整个模型的 {factor:.6g} 倍：脚本自己的裁剪，其上限未知",
)
