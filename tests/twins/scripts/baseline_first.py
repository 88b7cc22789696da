"""Rank 0 first trains a small baseline by itself; then all ranks train the model that is compared with it."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--baseline-steps", type=int, default=12)
args = parser.parse_args()

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(64, 6)
y = (x.sum(1) > 0).long()
model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2))
if rank == 0:
    baseline = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(baseline.parameters(), lr=0.1)
    for _ in range(args.baseline_steps):
        optimizer.zero_grad()
        baseline_loss = F.cross_entropy(baseline(x), y)
        baseline_loss.backward()
        optimizer.step()
    print(f"baseline {baseline_loss.item():.4f}", flush=True)
dist.barrier()
data = TensorDataset(x, y)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
model = DDP(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
weights = sum(p.sum().item() for p in model.parameters())
print(f"rank {rank}: loss {loss.item():.5f} weights {weights:.6f}", flush=True)
dist.destroy_process_group()
