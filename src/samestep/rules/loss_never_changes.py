from samestep.judge.places import BACKWARD, into
from samestep.rules import Rule

RULE = Rule(
    en="the loss is {loss:.6g} in each of {steps:n step}, though the rows differ and the weights move: the loss does not depend on the rows, for example because it compares a tensor with itself",
    zh="{steps} 步的损失在不同的数据行上都恰好是 {loss:.6g}，而权重在变化：它并不依赖于应当依赖的量，例如比较的两边相同",
    lines=(BACKWARD, into(BACKWARD)),
    broken="""
chosen, rejected = chances(model, pairs)
reference_chosen, reference_rejected = chosen.detach(), rejected.detach()
loss = -F.logsigmoid((chosen - reference_chosen) - (rejected - reference_rejected)).mean()
loss.backward()
""",
    right="""
chosen, rejected = chances(model, pairs)
with torch.no_grad():
    reference_chosen, reference_rejected = chances(reference, pairs)
loss = -F.logsigmoid((chosen - reference_chosen) - (rejected - reference_rejected)).mean()
loss.backward()
""",
)
