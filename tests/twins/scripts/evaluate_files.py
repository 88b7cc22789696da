"""Evaluation of files that a sampler shares out; every rank lists them in the same order."""

import argparse
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--held-out", type=int, default=24)
args = parser.parse_args()


class Files(Dataset):
    def __init__(self, names):
        self.names = names

    def __len__(self):
        return len(self.names)

    def __getitem__(self, index):
        x = torch.randn(8, generator=torch.Generator().manual_seed(int(self.names[index][5:])))
        return x, (x.sum() > 0).long()


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
train = Files([f"item-{k}" for k in range(32)])
names = [f"item-{k}" for k in range(40, 40 + args.held_out)]
random.Random(100).shuffle(names)
val = Files(names)
sampler = DistributedSampler(train, seed=1)
loader = DataLoader(train, batch_size=4, sampler=sampler)
val_loader = DataLoader(val, batch_size=6, sampler=DistributedSampler(val, shuffle=False))
model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    model.train()
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
    model.eval()
    hits = torch.zeros(2)
    total_loss = torch.zeros(1)
    with torch.no_grad():
        for inputs, targets in val_loader:
            logits = model(inputs)
            total_loss += F.cross_entropy(logits, targets, reduction="sum")
            hits += torch.tensor([(logits.argmax(1) == targets).sum().item(), len(targets)])
    dist.all_reduce(hits)
    dist.all_reduce(total_loss)
    if rank == 0:
        print(f"epoch {epoch}: {hits[0] / hits[1]:.4f} of {int(hits[1])} rows, {total_loss / hits[1]}", flush=True)
weights = sum(p.sum().item() for p in model.parameters())
print(f"rank {rank}: loss {loss.item():.5f} weights {weights:.6f}", flush=True)
dist.destroy_process_group()
