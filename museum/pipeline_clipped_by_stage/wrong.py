"""A pipeline of two stages, one on each rank, clipped by the norm of the whole gradient."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
stages = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 1)]
module = stages[rank]
stage = PipelineStage(module, rank, size, torch.device("cpu"))
schedule = ScheduleGPipe(stage, 4, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
for _ in range(10):
    x = torch.randn(8, 6)
    if rank == 0:
        schedule.step(x)
    else:
        schedule.step(target=x.sum(1, keepdim=True))
    gradients = [parameter.grad for parameter in module.parameters()]
    norm = torch.nn.utils.get_total_norm(gradients)
    torch.nn.utils.clip_grads_with_norm_(module.parameters(), 0.1, norm)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
