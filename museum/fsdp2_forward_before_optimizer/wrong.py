"""Trains with FSDP2; the loss before the training is printed."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
fully_shard(model, mesh=mesh)
torch.manual_seed(1 + dist.get_rank())
x = torch.randn(6, 8)
with torch.no_grad():
    print("before the training:", (model(x) - x.sum(1, keepdim=True)).square().mean().item())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(10):
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
