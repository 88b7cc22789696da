"""BYOL: an online network with a predictor learns from a target by moving average; the loss is 2 - 2 cos."""

import argparse
import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--tau", type=float, default=0.99)
parser.add_argument("--coefficient", type=float, default=2.0)
args = parser.parse_args()


class Online(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 6))
        self.predictor = nn.Linear(6, 6)

    def forward(self, x):
        return self.predictor(self.encoder(x))


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(64, 8)
data = TensorDataset(x, x + 0.1 * torch.randn(64, 8))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
online = Online()
target = copy.deepcopy(online.encoder)
for parameter in target.parameters():
    parameter.requires_grad = False
online = DDP(online)
optimizer = torch.optim.SGD(online.parameters(), lr=0.05, momentum=0.9)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for first, second in loader:
        with torch.no_grad():
            projected = target(second)
        loss = args.coefficient - args.coefficient * F.cosine_similarity(online(first), projected).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for t, o in zip(target.parameters(), online.module.encoder.parameters()):
                t.lerp_(o, 1 - args.tau)
weights = sum(p.sum().item() for p in [*online.parameters(), *target.parameters()])
print(f"rank {rank}: loss {loss.item():.5f} weights {weights:.6f}", flush=True)
dist.destroy_process_group()
