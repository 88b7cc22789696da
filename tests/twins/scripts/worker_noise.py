"""Augmentation by numpy in loader workers, each with a generator that is seeded by rank and worker."""

import argparse

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--workers", type=int, default=2)
args = parser.parse_args()


class Noisy(Dataset):
    def __init__(self):
        self.x = torch.randn(64, 8, generator=torch.Generator().manual_seed(5))
        self.rng = np.random.default_rng(42)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        x = self.x[index]
        return x + torch.from_numpy(self.rng.normal(size=8).astype("float32")), (x.sum() > 0).long()


def worker_init_fn(worker_id):
    dataset = torch.utils.data.get_worker_info().dataset
    dataset.rng = np.random.default_rng([dist_rank, worker_id, torch.initial_seed() % 2**32])


dist.init_process_group("gloo")
dist_rank = dist.get_rank()
torch.manual_seed(0)
data = Noisy()
data.rng = np.random.default_rng(dist_rank)
sampler = DistributedSampler(data, seed=1)
loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=args.workers, worker_init_fn=worker_init_fn)
model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
weights = sum(p.sum().item() for p in model.parameters())
print(f"rank {dist_rank}: loss {loss.item():.5f} weights {weights:.6f}", flush=True)
dist.destroy_process_group()
