"""Trains with FSDP1, HYBRID_SHARD, on a two-dimensional mesh."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))
torch.manual_seed(0)
module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
model = FullyShardedDataParallel(
    module,
    device_id=torch.device("cpu"),
    device_mesh=mesh["replicate"],
    sharding_strategy=ShardingStrategy.NO_SHARD,
    use_orig_params=True,
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + dist.get_rank())
for _ in range(10):
    x = torch.randn(6, 8)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
