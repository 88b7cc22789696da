"""DDP that accumulates the gradients of several micro-batches, without reducing before the last one."""

import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--accumulate", type=int, default=4)
parser.add_argument("--sync-always", action="store_true")
args = parser.parse_args()

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(128, 6)
data = TensorDataset(x, x.sum(1, keepdim=True) + 0.1 * torch.randn(128, 1))
sampler = DistributedSampler(data, shuffle=True)
loader = DataLoader(data, batch_size=4, sampler=sampler, drop_last=True)
model = DDP(nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=6, gamma=0.5)

for epoch in range(3):
    sampler.set_epoch(epoch)
    for i, (inputs, targets) in enumerate(loader):
        last = (i + 1) % args.accumulate == 0
        with nullcontext() if last or args.sync_always else model.no_sync():
            loss = F.mse_loss(model(inputs), targets) / args.accumulate
            loss.backward()
        if last:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)
weights = sum(p.sum().item() for p in model.parameters())
print(f"rank {rank}: loss {loss.item() * args.accumulate:.5f} weights {weights:.6f}", flush=True)
dist.destroy_process_group()
