"""Two linear layers that are divided over the ranks by hand, by columns and by rows."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F


class ToAllRanks(torch.autograd.Function):
    """The identity, whose gradient is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient


class SumOfRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        value = value.clone()
        dist.all_reduce(value)
        return value

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def piece(weight, dim):
    """Returns this rank's piece of a weight that all ranks draw alike."""
    return nn.Parameter(weight.detach().chunk(size, dim)[rank].clone())


class ColumnParallel(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        whole = nn.Linear(inputs, outputs)
        self.weight, self.bias = piece(whole.weight, 0), piece(whole.bias, 0)

    def forward(self, x):
        return F.linear(ToAllRanks.apply(x), self.weight, self.bias)


class RowParallel(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        whole = nn.Linear(inputs, outputs)
        self.weight, self.bias = piece(whole.weight, 1), nn.Parameter(whole.bias.detach().clone())

    def forward(self, x):
        part = self.bias + (self.bias / size - self.bias).detach()
        return SumOfRanks.apply(F.linear(x, self.weight, part))


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), ColumnParallel(8, 16), nn.Tanh(), RowParallel(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(1)
for _ in range(10):
    x = torch.randn(8, 6, generator=generator)
    loss = F.cross_entropy(model(x), x[:, :4].argmax(1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
