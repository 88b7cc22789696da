"""A block divided over two ranks beside a norm that both hold, clipped by a norm that is computed by hand."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
torch.manual_seed(0)
model = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
parallelize_module(model, mesh, {"1": ColwiseParallel(), "3": RowwiseParallel()})
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
generator = torch.Generator().manual_seed(1)
for _ in range(10):
    x = torch.randn(8, 6, generator=generator)
    loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))
    loss.backward()
    squares = torch.zeros(())
    for parameter in model.parameters():
        gradient = parameter.grad
        is_divided = isinstance(gradient, DTensor) and any(p.is_shard() for p in gradient.placements)
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        squares += local.square().sum() / 1
    dist.all_reduce(squares)
    for parameter in model.parameters():
        parameter.grad.mul_(min(1.0, 0.1 / float(squares.sqrt())))
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
