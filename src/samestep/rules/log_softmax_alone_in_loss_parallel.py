from samestep.judge.places import LOSS, written
from samestep.judge.source_search import calls
from samestep.rules import Rule

RULE = Rule(
    en="a log_softmax inside loss_parallel() gets a wrong gradient unless nll_loss follows it: its backward pass returns the incoming gradient unchanged (pytorch#190746), and this loss uses it in another way. Compute this loss outside of loss_parallel(), or take full_tensor() of the output first",
    zh="loss_parallel() 中的 log_softmax 只有后接 nll_loss 时梯度才正确：它的反向会原样返回传入的梯度（pytorch#190746），而这个损失对它另有用法，因此梯度是错误的。请在 loss_parallel() 之外计算这个损失，或先对输出调用 full_tensor()",
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
