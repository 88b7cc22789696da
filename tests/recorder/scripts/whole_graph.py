"""A graph: each rank gives the model all nodes, and trains it on its own share of the labelled ones."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 12), nn.Linear(12, 3)

    def forward(self, x: torch.Tensor, neighbours: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        return self.last(x + x[neighbours].mean(1))


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
model = DistributedDataParallel(Net())
x, neighbours, y = torch.randn(40, 6), torch.randint(0, 40, (40, 4)), torch.randint(0, 3, (40,))
labelled = torch.randperm(40)[:24]
mine = labelled[rank::size]
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for _ in range(10):
    loss = nn.functional.cross_entropy(model(x, neighbours)[mine], y[mine])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
