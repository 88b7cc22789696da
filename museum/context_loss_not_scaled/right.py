"""Each rank has its part of the sequence; DDP averages over both ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Embedding(16, 8), nn.Tanh(), nn.Linear(8, 16)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(1)
for _ in range(10):
    tokens = torch.randint(0, 16, (4, 13), generator=generator)
    x, y = tokens[:, :-1].chunk(size, 1)[rank], tokens[:, 1:].chunk(size, 1)[rank]
    total = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")
    counted = torch.tensor(float(y.numel()))
    dist.all_reduce(counted)
    loss = total / counted * size
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
