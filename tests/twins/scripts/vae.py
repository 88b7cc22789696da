"""A VAE: noise drawn in the model, a sum over elements divided by the rows of the batch."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--beta", type=float, default=1.0)
parser.add_argument("--reduction", default="sum", choices=["sum", "mean"])
args = parser.parse_args()


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.mu, self.logvar = nn.Linear(8, 16), nn.Linear(16, 3), nn.Linear(16, 3)
        self.decode = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x):
        hidden = F.relu(self.encode(x))
        mu, logvar = self.mu(hidden), self.logvar(hidden)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        return self.decode(z), mu, logvar


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 3) @ torch.randn(3, 8))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
model = DDP(VAE())
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
torch.manual_seed(50 + rank)
for epoch in range(4):
    sampler.set_epoch(epoch)
    for (x,) in loader:
        output, mu, logvar = model(x)
        reconstruction = F.mse_loss(output, x, reduction=args.reduction)
        kl = -0.5 * (1 + logvar - mu.square() - logvar.exp()).sum()
        if args.reduction == "sum":
            loss = (reconstruction + args.beta * kl) / len(x)
        else:
            loss = reconstruction + args.beta * kl / len(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
weights = sum(p.sum().item() for p in model.parameters())
print(f"rank {rank}: loss {loss.item():.5f} weights {weights:.6f}", flush=True)
dist.destroy_process_group()
