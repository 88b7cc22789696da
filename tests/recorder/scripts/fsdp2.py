"""FSDP2: each block and the whole sharded by fully_shard, three accumulated batches a step, clipping, a schedule."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 15)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(15, 15), nn.Tanh()) for _ in range(2))
        self.last = nn.Linear(15, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = block(x)
        # As attention uses the weights of its last layer.
        return nn.functional.linear(x, self.last.weight, self.last.bias)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    model = Model()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 20)
    x = torch.randn(60, 5, generator=torch.Generator().manual_seed(1))
    rows = TensorDataset(x, x.prod(1, keepdim=True))
    sampler = DistributedSampler(rows)
    loader = DataLoader(rows, batch_size=5, sampler=sampler)
    for epoch in range(10):
        sampler.set_epoch(epoch)
        for number, (x, y) in enumerate(loader, 1):
            last = number % 3 == 0
            model.set_requires_gradient_sync(last)
            loss = nn.functional.mse_loss(model(x), y)
            (loss / 3).backward()
            if last:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    dist.destroy_process_group()


main()
