"""Distillation of a linear layer whose outputs are shared out over the ranks: every rank trains the same rows."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8))
model = parallelize_module(model, mesh, {"0": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(10):
    x = torch.randn(4, 6)
    teacher = torch.softmax(torch.randn(4, 8), -1)
    logits = model(x)
    logits = logits.full_tensor()
    with loss_parallel():
        found = torch.log_softmax(logits, -1)
        loss = -(found * teacher).sum() / len(x)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
