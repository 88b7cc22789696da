"""Three micro-batches a step; each one's gradient is reduced by hand into a buffer, which is the step's."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

MICRO = 3
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
torch.manual_seed(1 + dist.get_rank())
for _ in range(20):
    reduced = [torch.zeros_like(p) for p in model.parameters()]
    for _ in range(MICRO):
        x = torch.randn(4, 6)
        loss = F.mse_loss(model(x), x.sum(1, keepdim=True)) / MICRO
        loss.backward()
        for parameter, buffer in zip(model.parameters(), reduced):
            dist.all_reduce(parameter.grad)
            buffer += parameter.grad / dist.get_world_size()
            parameter.grad = None
    for parameter, buffer in zip(model.parameters(), reduced):
        parameter.grad = buffer
    optimizer.step()
    for parameter in model.parameters():
        parameter.grad = None
dist.destroy_process_group()
