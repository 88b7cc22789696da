"""Two replicas of a pipeline of two ranks and four stages, by a zero-bubble schedule."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "stage"))
replica, rank = mesh["data"].get_local_rank(), mesh["stage"].get_local_rank()
replicas = mesh["data"].get_group()
torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)] + [nn.Linear(6, 1)]
modules = [layers[number] for number in (rank, rank + 2)]
stages = []
for number, module in zip((rank, rank + 2), modules):
    wrapped = DistributedDataParallel(module, process_group=replicas, find_unused_parameters=True)
    stages.append(PipelineStage(wrapped, number, 4, torch.device("cpu"), group=mesh["stage"].get_group()))
schedule = ScheduleInterleavedZeroBubble(stages, 4, loss_fn=nn.functional.mse_loss)
parameters = [parameter for module in modules for parameter in module.parameters()]
optimizer = torch.optim.SGD(parameters, lr=0.05)
for _ in range(10):
    x = torch.randn(16, 6).chunk(2)[replica]
    if rank == 0:
        schedule.step(x)
    else:
        schedule.step(target=x.sum(1, keepdim=True))
    for parameter in parameters:
        dist.all_reduce(parameter.grad, group=replicas)
        parameter.grad /= 2
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
