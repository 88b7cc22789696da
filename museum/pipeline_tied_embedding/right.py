"""A pipeline of two stages whose embedding and output layer are one weight."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
embedding, head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
head.weight = nn.Parameter(embedding.weight.detach().clone())
stages = [nn.Sequential(embedding, nn.Linear(8, 8), nn.Tanh()), nn.Sequential(nn.Linear(8, 8), head)]
module, tied = stages[rank], (embedding, head)[rank]
stage = PipelineStage(module, rank, size, torch.device("cpu"))


def criterion(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


schedule = ScheduleGPipe(stage, 4, loss_fn=criterion)
optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
for _ in range(10):
    tokens = torch.randint(0, 16, (8, 13))
    if rank == 0:
        schedule.step(tokens[:, :-1])
    else:
        schedule.step(target=tokens[:, 1:])
    dist.all_reduce(tied.weight.grad)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
