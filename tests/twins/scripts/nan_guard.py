"""Skips a step on all ranks when the loss of any is not finite, as with a broken row."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--broken-row", type=int, default=-1)
args = parser.parse_args()

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(96, 6)
y = x.sum(1, keepdim=True)
if args.broken_row >= 0:
    x[args.broken_row] = float("nan")
data = TensorDataset(x, y)
sampler = DistributedSampler(data, shuffle=False)
loader = DataLoader(data, batch_size=4, sampler=sampler)
model = DDP(nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
skipped = 0
for _ in range(2):
    for inputs, targets in loader:
        loss = F.mse_loss(model(inputs), targets)
        bad = (~torch.isfinite(loss.detach())).float()
        dist.all_reduce(bad)
        optimizer.zero_grad()
        if bad > 0:
            skipped += 1
            continue
        loss.backward()
        optimizer.step()
weights = sum(p.sum().item() for p in model.parameters())
print(f"rank {rank}: skipped {skipped} loss {loss.item():.5f} weights {weights:.6f}", flush=True)
dist.destroy_process_group()
