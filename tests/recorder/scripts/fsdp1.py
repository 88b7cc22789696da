"""FSDP's first version: each block and the whole sharded, three accumulated batches a step, clipping by the model."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

ORIGINAL = True


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(3)

    def sharded(module: nn.Module) -> FullyShardedDataParallel:
        return FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=ORIGINAL)

    blocks = [sharded(nn.Sequential(nn.Linear(15, 15), nn.Tanh())) for _ in range(2)]
    model = sharded(nn.Sequential(nn.Linear(5, 15), nn.Tanh(), *blocks, nn.Linear(15, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    x = torch.randn(60, 5, generator=torch.Generator().manual_seed(1))
    rows = TensorDataset(x, x.prod(1, keepdim=True))
    sampler = DistributedSampler(rows)
    loader = DataLoader(rows, batch_size=5, sampler=sampler)
    for epoch in range(10):
        sampler.set_epoch(epoch)
        for number, (x, y) in enumerate(loader, 1):
            last = number % 3 == 0
            with nullcontext() if last else model.no_sync():
                loss = nn.functional.mse_loss(model(x), y)
                (loss / 3).backward()
            if last:
                model.clip_grad_norm_(0.1)
                optimizer.step()
                optimizer.zero_grad()
    dist.destroy_process_group()


main()
