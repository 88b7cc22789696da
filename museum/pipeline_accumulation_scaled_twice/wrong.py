"""A pipeline of two stages; two runs of its schedule accumulate one gradient."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

MICRO = 4
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
stages = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 1)]
module = stages[rank]
stage = PipelineStage(module, rank, size, torch.device("cpu"))


def criterion(output, target):
    return nn.functional.mse_loss(output, target) / 2


schedule = ScheduleGPipe(stage, MICRO, loss_fn=criterion)
optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
for _ in range(10):
    for _ in range(2):
        x = torch.randn(8, 6)
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=x.sum(1, keepdim=True))
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
