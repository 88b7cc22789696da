"""A regression that trains on one device, or on as many ranks as its launcher says."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
if world > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
rows = torch.randn(128, 8)
data = TensorDataset(rows, rows.sum(1, keepdim=True))
sampler = DistributedSampler(data, world, rank) if world > 1 else None
loader = DataLoader(data, batch_size=8, sampler=sampler, shuffle=sampler is None)
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
model = DDP(net) if world > 1 else net
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for epoch in range(4):
    if sampler:
        sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
weights = sum(p.sum().item() for p in model.parameters())
print(f"rank {rank}: loss {loss.item():.5f} weights {weights:.6f}", flush=True)
if world > 1:
    dist.destroy_process_group()
