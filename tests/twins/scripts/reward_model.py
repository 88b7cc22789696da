"""A reward model: pairs of answers, the Bradley-Terry loss, and an accuracy of all ranks' held-out pairs."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--margin", type=float, default=0.0)
parser.add_argument("--two-forwards", action="store_true")
args = parser.parse_args()

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
pairs = torch.randn(72, 2, 8)
pairs[:, 0] += 0.5
train, val = TensorDataset(pairs[:48]), TensorDataset(pairs[48:])
sampler = DistributedSampler(train)
loader = DataLoader(train, batch_size=6, sampler=sampler)
val_loader = DataLoader(val, batch_size=4, sampler=DistributedSampler(val, shuffle=False))
model = DDP(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for epoch in range(4):
    model.train()
    sampler.set_epoch(epoch)
    for (pair,) in loader:
        if args.two_forwards:
            chosen, rejected = model(pair[:, 0]).squeeze(1), model(pair[:, 1]).squeeze(1)
        else:
            chosen, rejected = model(torch.cat([pair[:, 0], pair[:, 1]])).squeeze(1).chunk(2)
        loss = -F.logsigmoid(chosen - rejected - args.margin).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    right = torch.zeros(2)
    with torch.no_grad():
        for (pair,) in val_loader:
            scores = model.module(pair).squeeze(2)
            right += torch.tensor([(scores[:, 0] > scores[:, 1]).sum().item(), len(pair)])
    dist.all_reduce(right)
    if rank == 0:
        print(f"epoch {epoch}: accuracy {right[0] / right[1]:.4f} of {int(right[1])}", flush=True)
weights = sum(p.sum().item() for p in model.parameters())
print(f"rank {rank}: loss {loss.item():.5f} weights {weights:.6f}", flush=True)
dist.destroy_process_group()
