"""A checkpoint written while training goes on: with collectives of its own (own), or among the training's (same)?

torchrun --nproc-per-node 2 docs/silent-failures/async_save.py same
torchrun --nproc-per-node 2 docs/silent-failures/async_save.py own
"""

import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

dist.init_process_group("cpu:gloo", timeout=timedelta(seconds=20))
group = dist.new_group(backend="gloo") if sys.argv[1] == "own" else None
folder = [tempfile.mkdtemp()]
dist.broadcast_object_list(folder)

torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
saved = None
for step in range(40):
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 20:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments}
        saved = dcp.async_save(state, checkpoint_id=folder[0], process_group=group)
saved.result()
if dist.get_rank() == 0:
    print("trained and saved")
dist.barrier()  # else gloo may abort a process whose peer has ended first
dist.destroy_process_group()
