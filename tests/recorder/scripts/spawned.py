"""A script that starts its ranks itself, with torch.multiprocessing.spawn; DDP with a sampler."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

RANKS = 2


def train(rank: int, size: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/meeting", rank=rank, world_size=size)
    x = torch.linspace(-2, 2, 48 * 6).view(48, 6).cos()
    data = TensorDataset(x, x.sum(1, keepdim=True))
    sampler = DistributedSampler(data, size, rank)
    loader = DataLoader(data, batch_size=6, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for rows, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(rows), targets)
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.manual_seed(1)  # which the ranks do not inherit
    mp.spawn(train, args=(RANKS,), nprocs=RANKS)
