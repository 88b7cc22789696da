"""Join with a ZeroRedundancyOptimizer: rank 1 runs out of batches first. How far are the weights from the right ones?

torchrun --nproc-per-node 2 docs/silent-failures/join_zero.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

BATCHES = (20, 13)  # of each rank
SGD = {"lr": 0.02, "momentum": 0.9}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * rank + step), dtype=torch.float64)
    return nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def in_one_process() -> torch.Tensor:
    """The same training without ranks: each step adds the halves of the losses that there are."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    for step in range(max(BATCHES)):
        optimizer.zero_grad()
        for rank in range(2):
            if step < BATCHES[rank]:
                (loss_of(model, rank, step) / 2).backward()
        optimizer.step()
    return weights(model)


def joined(rank: int, zero: bool) -> torch.Tensor:
    model = DistributedDataParallel(network())
    if zero:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, **SGD)
    else:
        optimizer = torch.optim.SGD(model.parameters(), **SGD)
    with Join([model, optimizer] if zero else [model]):
        for step in range(BATCHES[rank]):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
    return weights(model)


dist.init_process_group("gloo")
rank = dist.get_rank()
right = in_one_process()
for what, zero in (("Join([ddp])", False), ("Join([ddp, ZeroRedundancyOptimizer])", True)):
    found = joined(rank, zero)
    of_rank = [torch.empty_like(found) for _ in range(2)]
    dist.all_gather(of_rank, found)
    if rank == 0:
        off, apart = (right - found).abs().max(), (of_rank[0] - of_rank[1]).abs().max()
        print(f"{what}: {off:.2g} from one process, the ranks {apart:.2g} apart")
dist.barrier()  # else gloo may abort a process whose peer has ended first
dist.destroy_process_group()
