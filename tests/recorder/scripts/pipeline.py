"""A pipeline of two stages, whose parameters have the same names: four micro-batches a step. Each rank reads all."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.data import DataLoader, TensorDataset

MICRO = 4


def main() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Sequential(nn.Linear(6, 1))]
    module = stages[rank]
    stage = PipelineStage(module, rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICRO, loss_fn=lambda output, target: (output - target).square().mean())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
    rows = TensorDataset(x, x.sum(1, keepdim=True))
    loader = DataLoader(rows, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(2))
    for _ in range(3):
        for x, y in loader:
            if rank == 0:
                schedule.step(x)
            else:
                schedule.step(target=y)
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


main()
