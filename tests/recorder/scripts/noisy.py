"""Dropout and BatchNorm on DDP, each rank with its own random numbers; writes a checkpoint, from which it resumes."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    x = torch.randn(64, 6)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    file = Path("noisy.pt")
    first = 0
    if file.exists():
        first, state = torch.load(file)
        model.load_state_dict(state)
        if first >= 2:
            raise SystemExit("the training has ended already")
    dist.barrier()
    model = DistributedDataParallel(model)
    torch.manual_seed(dist.get_rank())
    for epoch in range(first, 5):
        sampler.set_epoch(epoch)
        for rows, targets in loader:
            loss = nn.functional.mse_loss(model(rows), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if dist.get_rank() == 0:
                torch.save((2, model.module.state_dict()), file)
    dist.destroy_process_group()


main()
