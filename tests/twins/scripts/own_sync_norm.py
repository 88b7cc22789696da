"""A BatchNorm of its own that normalises the rows of all ranks; the first layer takes its shape from a batch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, sums):
        sums = sums.clone()
        dist.all_reduce(sums)
        return sums

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class SyncedNorm(nn.BatchNorm1d):
    def forward(self, x):
        if not self.training:
            return super().forward(x)
        sums = SumOverRanks.apply(torch.cat([x.sum(0), x.square().sum(0), x.new_tensor([len(x)])]))
        rows = sums[-1].detach()
        mean, square = (sums[:-1] / rows).chunk(2)
        return (x - mean) * torch.rsqrt(square - mean * mean + self.eps) * self.weight + self.bias


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(64, 8) * torch.linspace(0.5, 2, 64)[:, None]
data = TensorDataset(x, (x.sum(1) > 0).long())
sampler = DistributedSampler(data, seed=1)
loader = DataLoader(data, batch_size=8, sampler=sampler)
model = nn.Sequential(nn.LazyLinear(16, bias=False), SyncedNorm(16), nn.ReLU(), nn.Linear(16, 2))
model(x[:2])
model = DDP(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
weights = sum(p.sum().item() for p in model.parameters())
print(f"rank {rank}: loss {loss.item():.5f} weights {weights:.6f}", flush=True)
dist.destroy_process_group()
