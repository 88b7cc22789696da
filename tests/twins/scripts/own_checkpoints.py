"""Each rank evaluates all held-out rows by itself, and keeps its own file of what is best so far."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--every", type=int, default=2)
parser.add_argument("--weight", type=float, default=1.0)
args = parser.parse_args()

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(88, 6)
y = x.sum(1, keepdim=True) + 0.3 * torch.randn(88, 1)
data, held_out = TensorDataset(x[:64], y[:64]), TensorDataset(x[64:], y[64:])
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=4, sampler=sampler)
val_loader = DataLoader(held_out, batch_size=8)
model = DDP(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
step, best = 0, float("inf")
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        model.train()
        loss = args.weight * F.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % args.every == 0:
            model.eval()
            with torch.no_grad():
                val_loss = sum(F.mse_loss(model.module(a), b, reduction="sum").item() for a, b in val_loader)
            if val_loss < best:
                best = val_loss
                torch.save(model.module.state_dict(), f"best-{rank}-{step}.pt")
weights = sum(p.sum().item() for p in model.parameters())
files = len([name for name in os.listdir(".") if name.startswith(f"best-{rank}")])
print(f"rank {rank}: loss {loss.item():.5f} weights {weights:.6f} files {files}", flush=True)
dist.destroy_process_group()
