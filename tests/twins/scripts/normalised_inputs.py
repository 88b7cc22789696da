"""Inputs and rewards normalised by the mean and deviation of all ranks' rows."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batches", action="store_true")
args = parser.parse_args()


def moments(x):
    sums = torch.stack([x.sum(0), x.square().sum(0), torch.full_like(x[0], len(x))])
    dist.all_reduce(sums)
    mean = sums[0] / sums[2]
    return mean, (sums[1] / sums[2] - mean.square()).clamp(min=1e-6).sqrt()


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(64, 6) * 3 + torch.linspace(0, 4, 64)[:, None]
y = x.sum(1, keepdim=True) / 8
mean, std = moments(x[rank::world])
data = TensorDataset(x, y)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
model = DDP(nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        if args.batches:
            mean, std = moments(inputs)
        loss = F.mse_loss(model((inputs - mean) / std), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
weights = sum(p.sum().item() for p in model.parameters())
print(f"rank {rank}: loss {loss.item():.5f} weights {weights:.6f}", flush=True)
dist.destroy_process_group()
