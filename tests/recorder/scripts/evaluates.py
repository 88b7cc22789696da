"""Dropout on DDP with random numbers of each rank's own; evaluates held-out rows on all ranks after each epoch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def main() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    x = torch.randn(45, 6)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    trained, held_out = Subset(data, range(32)), Subset(data, range(32, 45))
    sampler = DistributedSampler(trained)
    loader = DataLoader(trained, batch_size=8, sampler=sampler)
    evaluation = DataLoader(Subset(held_out, range(rank, len(held_out), size)), batch_size=4)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.Linear(16, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(rank)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for rows, targets in loader:
            loss = F.cross_entropy(model(rows), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        found = {"wrong": torch.zeros(1), "of each class": torch.zeros(1, 1)}
        with torch.no_grad():
            for rows, targets in evaluation:
                found["wrong"] += (model.module(rows).argmax(1) != targets).sum()
                found["of each class"] += targets.sum()
        for name in found:
            dist.all_reduce(found[name])
        if rank == 0:
            print(f"epoch {epoch}: {int(found['wrong'])} of {len(held_out)} wrong")
        model.train()
    dist.destroy_process_group()


main()
