"""VICReg: the model's forward returns the loss, which has terms over the gathered rows of all ranks."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--norm", action="store_true")
parser.add_argument("--dropout", type=float, default=0.0)
args = parser.parse_args()


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows):
        gathered = [torch.zeros_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, rows)
        return tuple(gathered)

    @staticmethod
    def backward(ctx, *gradients):
        gradient = torch.stack(gradients)
        dist.all_reduce(gradient)
        return gradient[dist.get_rank()]


class VICReg(nn.Module):
    def __init__(self):
        super().__init__()
        norm = nn.BatchNorm1d(16) if args.norm else nn.Identity()
        self.expander = nn.Sequential(nn.Linear(6, 16), norm, nn.ReLU(), nn.Dropout(args.dropout), nn.Linear(16, 4))

    def forward(self, x, y):
        x, y = self.expander(torch.cat([x, y])).chunk(2)
        invariance = (x - y).square().mean()
        x = torch.cat(Gather.apply(x))
        x = x - x.mean(0)
        covariance = x.T @ x / (len(x) - 1)
        deviation = (x.var(0) + 1e-4).sqrt()
        variance = torch.relu(1 - deviation).mean()
        return 25 * invariance + 25 * variance + (covariance - covariance.diag().diag()).square().sum() / 4


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(5)
rows = torch.randn(96, 6)
data = TensorDataset(rows, rows + 0.1 * torch.randn(96, 6))
sampler = DistributedSampler(data, seed=2)
loader = DataLoader(data, batch_size=8, sampler=sampler)
model = DDP(VICReg())
optimizer = torch.optim.SGD(model.parameters(), lr=0.005)
torch.manual_seed(rank)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        model(x, y).backward()
        optimizer.step()
print(f"rank {rank}: {sum(p.square().sum() for p in model.parameters()).item():.6f}", flush=True)
dist.destroy_process_group()
