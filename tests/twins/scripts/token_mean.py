"""A mean over the tokens of all ranks: answers have other lengths, so the count of targets is reduced."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--optimizer", default="SGD", choices=["SGD", "Adam"])
args = parser.parse_args()

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(2)
tokens = torch.randint(1, 15, (64, 10))
lengths = torch.randint(2, 10, (64, 1))
labels = tokens.roll(-1, 1).masked_fill(torch.arange(10) >= lengths, -100)
data = TensorDataset(tokens, labels)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=4, sampler=sampler)
model = DDP(nn.Sequential(nn.Embedding(15, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 15)))
optimizer = getattr(torch.optim, args.optimizer)(model.parameters(), lr=0.05)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        num_items = (targets != -100).sum().float()
        dist.all_reduce(num_items)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum") * world / num_items
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
weights = sum(p.sum().item() for p in model.parameters())
print(f"rank {rank}: loss {loss.item():.5f} weights {weights:.6f}", flush=True)
dist.destroy_process_group()
