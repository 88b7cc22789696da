"""An embedding whose rows are divided over two ranks; token 1 is padding, and is not to be trained."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

PADDING = 1


class SumOfRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        value = value.clone()
        dist.all_reduce(value)
        return value

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class DividedEmbedding(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(torch.randn(16, 8), mesh, [Shard(0)]))

    def forward(self, tokens):
        rows = self.weight.to_local()
        first = dist.get_rank() * len(rows) if dist.get_world_size() > 1 else 0
        here = (tokens >= first) & (tokens < first + len(rows))
        padding = PADDING - first if 0 <= PADDING - first < len(rows) else None
        found = nn.functional.embedding((tokens - first).where(here, 0), rows, padding_idx=padding)
        return SumOfRanks.apply(found * here[..., None])


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
torch.manual_seed(0)
model = nn.Sequential(DividedEmbedding(mesh), nn.Tanh(), nn.Linear(8, 16))
parallelize_module(model, mesh, {"2": ColwiseParallel(output_layouts=Replicate())})
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
generator = torch.Generator().manual_seed(1)
for _ in range(10):
    tokens = torch.randint(0, 16, (4, 13), generator=generator)
    logits = model(tokens[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
