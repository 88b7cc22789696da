from samestep.proof.script.places import LOSS, written
from samestep.proof.script.source_search import calls
from samestep.rules import Rule

RULE = Rule(
    en="inside loss_parallel() the backward of log_softmax returns its gradient unchanged, which is right in front of nll_loss alone (pytorch#190746): a log_softmax that something else uses gets a wrong gradient. Leave the context for that loss, or take full_tensor() of the output first",
    zh="在 loss_parallel() 中，log_softmax 的反向会原样返回梯度，这只有在其后是 nll_loss 时才正确（pytorch#190746）：被其他计算使用的 log_softmax 会得到错误的梯度。请在该上下文之外计算这个损失，或先对输出取 full_tensor()",
    lines=(
        written(lambda source: calls(source, "log_softmax")),
        written(lambda source: calls(source, "loss_parallel")),
        *LOSS,
    ),
    broken="""
with loss_parallel():
    chances = F.log_softmax(logits, dim=-1)
    (chances.exp() * (chances - wanted)).sum().backward()
""",
    right="""
with loss_parallel():
    chances = F.log_softmax(logits.full_tensor(), dim=-1)
    (chances.exp() * (chances - wanted)).sum().backward()
""",
)
