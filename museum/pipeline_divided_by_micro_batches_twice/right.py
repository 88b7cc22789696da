"""A pipeline of two stages; each micro-batch's loss is divided by the rows of the whole batch."""

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
    return nn.functional.mse_loss(output, target, reduction="sum") / 8


schedule = ScheduleGPipe(stage, MICRO, loss_fn=criterion, scale_grads=False)
optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
for _ in range(10):
    x = torch.randn(8, 6)
    if rank == 0:
        schedule.step(x)
    else:
        schedule.step(target=x.sum(1, keepdim=True))
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
