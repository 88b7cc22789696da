"""Each rank has its part of the sequence; the loss is the mean over the whole one."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for _ in range(10):
    texts = torch.randn(4, 12, 8)  # rows, positions, features
    part = texts.chunk(size, dim=1)[rank]
    loss = (model(part) - part.sum(2, keepdim=True)).square().mean()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= size
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
