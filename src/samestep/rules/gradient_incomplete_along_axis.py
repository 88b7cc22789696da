from samestep.judge.places import FORWARD, called, parameter
from samestep.rules import Rule

RULE = Rule(
    en="the gradient of {parameter} is not the same on the {ranks} ranks along {axis}, though each of them holds the whole parameter: the gradients that flow back from the divided layers after it are not added up over these ranks in the backward pass",
    zh="{parameter} 在沿 {axis} 的 {ranks} 个 rank 上各自完整，梯度却各不相同：从其后被切分的层反传回来的梯度没有在反向传播中跨这些 rank 相加",
    lines=(called("collective", "reduce"), parameter, FORWARD),
    broken="""
class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        dist.all_reduce(total, group=tensor)
        return gradient


hidden = columns(Copy.apply(norm(x)))
""",
    right="""
class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        dist.all_reduce(total, group=tensor)
        return total


hidden = columns(Copy.apply(norm(x)))
""",
)
