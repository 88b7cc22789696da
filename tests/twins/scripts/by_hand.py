"""No wrapper: weights are broadcast at the start, and gradients averaged by hand after each backward."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--clip", default="", choices=["", "each", "whole"])
parser.add_argument("--asynchronous", action="store_true")
args = parser.parse_args()


def average_gradients(model, world):
    handles = []
    for parameter in model.parameters():
        handles.append(dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM, async_op=True))
        if not args.asynchronous:
            handles[-1].wait()
    for handle, parameter in zip(handles, model.parameters()):
        handle.wait()
        parameter.grad /= world


def clip(model, limit=0.1):
    if args.clip == "each":
        for parameter in model.parameters():
            parameter.grad.mul_(min(1.0, limit / (parameter.grad.norm().item() + 1e-6)))
    elif args.clip == "whole":
        norm = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).norm()
        for parameter in model.parameters():
            parameter.grad.mul_(min(1.0, limit / (norm.item() + 1e-6)))


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))
for parameter in model.parameters():
    dist.broadcast(parameter.data, src=0)
data_generator = torch.Generator().manual_seed(7)
x = torch.randn(64, 6, generator=data_generator)
data = TensorDataset(x, x.square().sum(1, keepdim=True) / 6)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
for epoch in range(4):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        average_gradients(model, world)
        clip(model)
        optimizer.step()
weights = sum(p.sum().item() for p in model.parameters())
print(f"rank {rank}: loss {loss.item():.5f} weights {weights:.6f}", flush=True)
dist.destroy_process_group()
