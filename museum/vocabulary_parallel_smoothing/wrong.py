"""A head whose vocabulary is divided over two ranks, trained by a loss that is computed on each rank's part."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

SMOOTHING = 0.1


class SumOfRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        value = value.clone()
        dist.all_reduce(value)
        return value

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def vocabulary_parallel_loss(logits, targets):
    width = logits.shape[-1]
    first = dist.get_rank() * width
    here = (targets >= first) & (targets < first + width)
    found = logits.gather(-1, (targets - first).where(here, 0)[..., None])[..., 0]
    log_sum = SumOfRanks.apply(logits.exp().sum(-1)).log()
    loss = log_sum - SumOfRanks.apply(found * here)
    mean_log_probability = logits.mean(-1) - log_sum
    return ((1 - SMOOTHING) * loss - SMOOTHING * mean_log_probability).mean()


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(16, 8), nn.Tanh(), nn.Linear(8, 16))
parallelize_module(model, mesh, {"2": ColwiseParallel(output_layouts=Shard(-1))})
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
generator = torch.Generator().manual_seed(1)
for _ in range(10):
    tokens = torch.randint(0, 16, (4, 13), generator=generator)
    loss = vocabulary_parallel_loss(model(tokens[:, :-1]), tokens[:, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
