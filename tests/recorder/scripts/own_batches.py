"""Without a DataLoader: the ranks take turns at cutting micro-batches from the tokens, four in each step."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

MICRO, ROWS, LENGTH = 4, 3, 8


def main() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    tokens = torch.randint(0, 16, (4000,), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    each, place = MICRO // size, rank * ROWS * LENGTH
    for _ in range(12):
        for number in range(each):
            x, y = (tokens[place + i : place + i + ROWS * LENGTH].view(ROWS, LENGTH) for i in (0, 1))
            place += size * ROWS * LENGTH
            model.require_backward_grad_sync = number == each - 1
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum") / y.numel()
            (loss / each).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


main()
