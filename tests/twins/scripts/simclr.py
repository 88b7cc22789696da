"""SimCLR: two views joined in one forward, and negatives of all ranks."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--temperature", type=float, default=0.5)
args = parser.parse_args()


class GatherLayer(torch.autograd.Function):
    """Gathers from all ranks; in backward each rank receives the sum of all ranks' gradients of its part."""

    @staticmethod
    def forward(ctx, x):
        outputs = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(outputs, x)
        return tuple(outputs)

    @staticmethod
    def backward(ctx, *grads):
        gradient = torch.stack(grads)
        dist.all_reduce(gradient)
        return gradient[dist.get_rank()]


def nt_xent(first, second):
    n = len(first)
    z = torch.cat([first, second])
    similarity = (z @ z.T / args.temperature).masked_fill(torch.eye(2 * n, dtype=torch.bool), -1e9)
    return F.cross_entropy(similarity, torch.arange(2 * n).roll(n))


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
base = torch.randn(64, 8)
data = TensorDataset(base + 0.2 * torch.randn(64, 8), base + 0.2 * torch.randn(64, 8))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler, drop_last=True)
model = DDP(nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 6)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for view1, view2 in loader:
        z1, z2 = F.normalize(model(torch.cat([view1, view2])), dim=1).chunk(2)
        z1, z2 = torch.cat(GatherLayer.apply(z1)), torch.cat(GatherLayer.apply(z2))
        loss = nt_xent(z1, z2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
weights = sum(p.sum().item() for p in model.parameters())
print(f"rank {rank}: loss {loss.item():.5f} weights {weights:.6f}", flush=True)
dist.destroy_process_group()
