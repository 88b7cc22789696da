"""A classifier whose averaged gradients the script changes by its own code before each step, alike on all ranks."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--edit", default="clamp", choices=["clamp", "sign", "centralize", "decay", "trust"])
args = parser.parse_args()


def edited(p):
    if args.edit == "clamp":
        return p.grad.clamp(-0.05, 0.05)
    if args.edit == "sign":
        return p.grad.sign()
    if args.edit == "centralize":
        return p.grad - p.grad.mean(-1, keepdim=True) if p.dim() > 1 else p.grad
    if args.edit == "decay":
        return p.grad + 0.01 * p
    return p.grad * (p.norm() / p.grad.norm().clamp(min=1e-8)) if p.dim() > 1 else p.grad


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)))
rows, labels = torch.randn(96, 8), torch.randint(0, 4, (96,))
data = TensorDataset(rows, labels)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for epoch in range(4):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p.grad.copy_(edited(p))
        optimizer.step()
weights = sum(p.sum().item() for p in model.parameters())
print(f"rank {rank}: loss {loss.item():.5f} weights {weights:.6f}", flush=True)
dist.destroy_process_group()
