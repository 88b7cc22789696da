"""Regression on DDP in float32: three micro-batches a step, of which only the last is reduced; the loss by hand."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

MICRO = 3


class Waves(Dataset):
    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.linspace(0, 1, 6) + index / 60
        return x, x.sin().sum()


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 1)))
    data = Waves()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=5, sampler=sampler, num_workers=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    for epoch in range(20):
        sampler.set_epoch(epoch)
        for number, (x, y) in enumerate(loader):
            last = (number + 1) % MICRO == 0
            with contextlib.nullcontext() if last else model.no_sync():
                loss = ((model(x).squeeze(1) - y) ** 2).mean() / MICRO
                loss.backward()
            if last:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    dist.destroy_process_group()


main()
