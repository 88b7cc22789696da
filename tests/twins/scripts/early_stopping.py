"""Stops when the validation loss of all ranks no longer falls; lowers the rate when it stands still."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--patience", type=int, default=2)
parser.add_argument("--plateau", action="store_true")
args = parser.parse_args()

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(32, 8)
y = (x.sum(1) + torch.randn(32) > 0).long()
data, val = TensorDataset(x[:24], y[:24]), TensorDataset(x[24:], y[24:])
sampler = DistributedSampler(data, seed=1)
loader = DataLoader(data, batch_size=6, sampler=sampler)
val_loader = DataLoader(val, batch_size=4, sampler=DistributedSampler(val, shuffle=False))
model = DDP(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
best, bad = 1e9, 0
for epoch in range(20):
    model.train()
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        val_loss = torch.stack([F.cross_entropy(model.module(a), b) for a, b in val_loader]).mean()
    dist.all_reduce(val_loss)
    val_loss /= world
    if args.plateau:
        plateau.step(val_loss)
    if val_loss.item() < best:
        best, bad = val_loss.item(), 0
        torch.save(model.module.state_dict(), "best.pt") if rank == 0 else None
    else:
        bad += 1
    if bad >= args.patience:
        break
weights = sum(p.sum().item() for p in model.parameters())
print(f"rank {rank}: epoch {epoch} best {best:.5f} weights {weights:.6f}", flush=True)
dist.destroy_process_group()
