"""FSDP2 with four micro-batches a step: the reduction waits for the last."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

MICRO_BATCHES = 4
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = torch.randn(192, 6, generator=torch.Generator().manual_seed(1))
data = TensorDataset(rows, rows[:, :4].argmax(1))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=2, sampler=sampler)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for number, (x, y) in enumerate(loader):
        is_last = (number + 1) % MICRO_BATCHES == 0
        model.set_requires_gradient_sync(False)
        loss = F.cross_entropy(model(x), y) / MICRO_BATCHES
        loss.backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
dist.destroy_process_group()
