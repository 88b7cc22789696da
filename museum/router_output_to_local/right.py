"""A router that every rank holds, and experts whose hidden width is divided over two ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor


class Experts(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.router = nn.Parameter(distribute_tensor(torch.randn(4, 6) / 4, mesh, [Replicate()]))
        self.up = nn.Parameter(distribute_tensor(torch.randn(4, 6, 16) / 4, mesh, [Shard(2)]))
        self.down = nn.Parameter(distribute_tensor(torch.randn(4, 16, 4) / 4, mesh, [Shard(1)]))

    def forward(self, x):
        x = DTensor.from_local(x, self.router.device_mesh, [Replicate()])
        weights = (x @ self.router.T).softmax(-1).to_local(grad_placements=[Partial()])
        x = x.to_local(grad_placements=[Partial()])
        hidden = torch.tanh(torch.einsum("bi,eih->beh", x, self.up.to_local()))
        output = torch.einsum("beh,eho,be->bo", hidden, self.down.to_local(), weights)
        return DTensor.from_local(output, self.router.device_mesh, [Partial()]).full_tensor()


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
torch.manual_seed(0)
model = Experts(mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(1)
for _ in range(10):
    x = torch.randn(8, 6, generator=generator)
    loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
