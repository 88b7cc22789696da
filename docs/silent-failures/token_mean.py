"""torch's DDP over texts of unequal length, with the loss that every tutorial has: another gradient on 2 processes."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
draw = torch.Generator().manual_seed(0)
lengths = torch.randint(5, 61, (8,), generator=draw)  # eight texts, of 5 to 60 words
words = torch.randint(0, 100, (8, 60), generator=draw)
tags = (words % 7).masked_fill(torch.arange(60) >= lengths[:, None], -100)  # -100: padding, which counts for nothing


def gradient(model: nn.Module, rows: slice) -> torch.Tensor:
    loss = F.cross_entropy(model(words[rows]).flatten(0, 1), tags[rows].flatten(), ignore_index=-100)
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(100, 16), nn.Linear(16, 7))
whole = gradient(model, slice(None)).clone()  # all 8 texts in one process
shared = gradient(DistributedDataParallel(model), slice(rank, None, size))  # each process its share of the same 8
if rank == 0:
    off = (shared - whole).norm() / whole.norm()
    print(f"{size} processes: the gradient is {off:.1%} off that of one process")
dist.barrier()  # else gloo may abort a process whose peer has ended first
dist.destroy_process_group()
