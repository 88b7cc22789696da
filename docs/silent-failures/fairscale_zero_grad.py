"""fairscale's OSS with ShardedDataParallel: how far from plain training is it with each kind of zero_grad?

pip install --no-deps --target fairscale-only fairscale==0.4.13
PYTHONPATH=fairscale-only torchrun --nproc-per-node 2 docs/silent-failures/fairscale_zero_grad.py
"""

import torch
import torch.distributed as dist
from fairscale.nn.data_parallel import ShardedDataParallel
from fairscale.optim.oss import OSS
from torch import nn

SGD = {"lr": 0.02, "momentum": 0.9}
STEPS = 20


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * rank + step), dtype=torch.float64)
    return nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def in_one_process() -> torch.Tensor:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(2):
            (loss_of(model, rank, step) / 2).backward()
        optimizer.step()
    return weights(model)


def sharded(rank: int, **zero_grad: bool) -> torch.Tensor:
    module = network()
    optimizer = OSS(module.parameters(), optim=torch.optim.SGD, **SGD)
    model = ShardedDataParallel(module, optimizer)
    for step in range(STEPS):
        optimizer.zero_grad(**zero_grad)
        loss_of(model, rank, step).backward()
        optimizer.step()
    return weights(module)


dist.init_process_group("gloo")
rank = dist.get_rank()
right = in_one_process()
for what, given in (("zero_grad()", {}), ("zero_grad(set_to_none=False)", {"set_to_none": False})):
    off = (right - sharded(rank, **given)).abs().max()
    if rank == 0:
        print(f"{what}: {off:.2g} from one process")
dist.barrier()  # else gloo may abort a process whose peer has ended first
dist.destroy_process_group()
