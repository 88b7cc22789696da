"""Learns the codes of a frozen random projection, which is no part of the wrapped model."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


class Quantizer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("projection", torch.randn(6, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.projection).argmax(1)


dist.init_process_group("gloo")
torch.manual_seed(0)
quantizer = Quantizer()
torch.manual_seed(1 + dist.get_rank())
model = DistributedDataParallel(nn.Linear(6, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(20):
    x = torch.randn(4, 6)
    loss = F.cross_entropy(model(x), quantizer(x))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
