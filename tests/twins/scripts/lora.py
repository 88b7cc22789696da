"""LoRA: a frozen base, adapters that are trained, a head that is trained as a whole."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--rank-of-adapters", type=int, default=2)
parser.add_argument("--optimizer", default="AdamW", choices=["SGD", "AdamW"])
args = parser.parse_args()


class LoRA(nn.Module):
    def __init__(self, base, r):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(r, base.in_features) * 0.1)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, r))

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(x, self.lora_A), self.lora_B)


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
r = args.rank_of_adapters
net = nn.Sequential(LoRA(nn.Linear(8, 16), r), nn.ReLU(), LoRA(nn.Linear(16, 16), r), nn.ReLU(), nn.Linear(16, 3))
model = DDP(net)
x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
data = TensorDataset(x, x[:, :3].argmax(1))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
trainable = [p for name, p in model.named_parameters() if p.requires_grad]
optimizer = getattr(torch.optim, args.optimizer)(trainable, lr=0.02)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
weights = sum(p.sum().item() for p in model.parameters())
print(f"rank {rank}: loss {loss.item():.5f} weights {weights:.6f}", flush=True)
dist.destroy_process_group()
