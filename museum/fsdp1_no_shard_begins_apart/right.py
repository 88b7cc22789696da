"""FSDP that shards nothing, and only averages the gradients."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
for parameter in module.parameters():
    dist.broadcast(parameter.data, 0)
model = FullyShardedDataParallel(
    module,
    sharding_strategy=ShardingStrategy.NO_SHARD,
    device_id=torch.device("cpu"),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = torch.randn(96, 6, generator=torch.Generator().manual_seed(1))
data = TensorDataset(rows, rows[:, :4].argmax(1))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=4, sampler=sampler)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
