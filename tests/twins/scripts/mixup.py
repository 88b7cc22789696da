"""Mixup by numpy between the loader and the model, with each rank's own random numbers."""

import argparse

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--alpha", type=float, default=0.4)
args = parser.parse_args()


def mixup(inputs, targets):
    lam = np.random.beta(args.alpha, args.alpha)
    order = torch.from_numpy(np.random.permutation(len(inputs)))
    return lam * inputs + (1 - lam) * inputs[order], targets, targets[order], lam


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
np.random.seed(40 + rank)
x = torch.randn(64, 6)
data = TensorDataset(x, (x.sum(1) > 0).long())
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
model = DDP(nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        mixed, first, second, lam = mixup(inputs, targets)
        output = model(mixed)
        loss = lam * F.cross_entropy(output, first) + (1 - lam) * F.cross_entropy(output, second)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
weights = sum(p.sum().item() for p in model.parameters())
print(f"rank {rank}: loss {loss.item():.5f} weights {weights:.6f}", flush=True)
dist.destroy_process_group()
