"""An IterableDataset whose rows are shared out over ranks and loader workers, with noise of each worker's own."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

parser = argparse.ArgumentParser()
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--noise", action="store_true")
args = parser.parse_args()


class Stream(IterableDataset):
    def __init__(self, rank, world):
        self.rank, self.world = rank, world

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        share, shares = self.rank * workers + worker, self.world * workers
        noise = torch.Generator().manual_seed(100 + share)
        for index in range(share, 96, shares):
            row = torch.randn(8, generator=torch.Generator().manual_seed(index))
            label = (row.sum() > 0).long()
            if args.noise:
                row = row + 0.1 * torch.randn(8, generator=noise)
            yield row, label


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
loader = DataLoader(Stream(rank, world), batch_size=6, num_workers=args.workers)
model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
for _ in range(2):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
weights = sum(p.sum().item() for p in model.parameters())
print(f"rank {rank}: loss {loss.item():.5f} weights {weights:.6f}", flush=True)
dist.destroy_process_group()
