"""Trains 21 rows in batches of 8 on two ranks: the last batch has 3 rows on rank 0 and 2 on rank 1."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(21, 6)
y = x.prod(1, keepdim=True)
model = DistributedDataParallel(nn.Linear(6, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for epoch in range(6):
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
    for batch in order.split(8):
        own = batch[rank::size]
        loss = F.mse_loss(model(x[own]), y[own])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
