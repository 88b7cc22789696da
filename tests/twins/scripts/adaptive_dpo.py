"""DPO whose beta adapts to the mean margin of all ranks, as in a reward model with a moving margin."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--optimizer", default="SGD", choices=["SGD", "AdamW"])
args = parser.parse_args()

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(64, 8)
data = TensorDataset(x, x + 0.5 * torch.randn(64, 8))
sampler = DistributedSampler(data, seed=1)
loader = DataLoader(data, 4, sampler=sampler, drop_last=True)
model = DDP(nn.Linear(8, 1))
optimizer = getattr(torch.optim, args.optimizer)(model.parameters(), lr=0.1)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for good, bad in loader:
        scores = model(torch.cat([good, bad]))
        margin = (scores[: len(good)] - scores[len(good) :]).squeeze(1)
        mean = margin.detach().mean()
        dist.all_reduce(mean)
        mean = mean / world
        beta = 1 + 0.6 * (mean - 0.1)
        loss = -F.logsigmoid(beta * margin).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
weights = sum(p.sum().item() for p in model.parameters())
print(f"rank {rank}: loss {loss.item():.5f} weights {weights:.6f}", flush=True)
dist.destroy_process_group()
