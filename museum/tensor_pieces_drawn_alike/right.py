"""Two linear layers that are divided over the ranks by hand; each rank draws its pieces."""

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


class Divided(nn.Module):
    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(10 + rank)
            self.up = nn.Parameter(torch.randn(16 // size, 8) / 4)
            self.down = nn.Parameter(torch.randn(4, 16 // size) / 4)

    def forward(self, x):
        return SumOfRanks.apply(torch.tanh(ToAllRanks.apply(x) @ self.up.T) @ self.down.T)


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), Divided())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(1)
for _ in range(10):
    x = torch.randn(8, 6, generator=generator)
    loss = F.cross_entropy(model(x), x[:, :4].argmax(1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
