"""Weights in float32 under bf16 autocast, or weights in bf16 with steps that are large enough for them."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--pure", action="store_true")
args = parser.parse_args()

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(64, 16)
data = TensorDataset(x, x[:, :4].argmax(1))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
dtype, lr = torch.float32, 1e-3
if args.pure:
    dtype, lr = torch.bfloat16, 2e-2
model = DDP(net.to(dtype))
optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=not args.pure):
            loss = F.cross_entropy(model(inputs.to(dtype)), targets)
        loss.backward()
        optimizer.step()
weights = sum(p.float().sum().item() for p in model.parameters())
print(f"rank {rank}: loss {loss.item():.5f} weights {weights:.6f}", flush=True)
dist.destroy_process_group()
