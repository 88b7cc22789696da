"""Two linear layers divided over the ranks by hand, by columns and by rows, with DTensors as weights."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


class ToAllRanks(torch.autograd.Function):
    """The identity, whose gradient is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        dist.all_reduce(gradient.t().contiguous())
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
    def __init__(self, mesh):
        super().__init__()
        self.up = nn.Parameter(distribute_tensor(torch.randn(16, 6) / 4, mesh, [Shard(0)]))
        self.down = nn.Parameter(distribute_tensor(torch.randn(4, 16) / 4, mesh, [Shard(1)]))

    def forward(self, x):
        x = ToAllRanks.apply(x.T.contiguous()).T
        hidden = torch.tanh(x @ self.up.to_local().T)
        return SumOfRanks.apply(hidden @ self.down.to_local().T)


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 6), Divided(mesh))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(1)
for _ in range(10):
    x = torch.randn(8, 6, generator=generator)
    loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
