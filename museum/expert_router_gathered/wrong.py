"""A mixture of experts: all ranks' tokens are gathered, and each rank adds what its experts give."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EXPERTS = 4


def gathered(part):
    parts = [torch.empty_like(part) for _ in range(size)]
    dist.all_gather(parts, part.contiguous())
    return torch.cat(parts)


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part):
        return gathered(part)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient.chunk(size)[rank]


class SumOfOwnRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        value = value.clone()
        dist.all_reduce(value)
        return value.chunk(size)[rank].clone()

    @staticmethod
    def backward(ctx, gradient):
        return gathered(gradient)


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(8, EXPERTS, bias=False)
        experts = [nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(EXPERTS)]
        self.mine = range(rank * EXPERTS // size, (rank + 1) * EXPERTS // size)
        self.experts = nn.ModuleDict({f"expert {number}": experts[number] for number in self.mine})

    def forward(self, x):
        probabilities = self.router(x).softmax(-1)
        self.balance = probabilities.square().mean()
        tokens, weights = Gather.apply(x), gathered(probabilities)
        own = [weights[:, [number]] * self.experts[f"expert {number}"](tokens) for number in self.mine]
        return x + SumOfOwnRows.apply(sum(own))


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), Mixture(), nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = torch.randn(96, 6, generator=torch.Generator().manual_seed(1))
data = TensorDataset(rows, rows[:, :4].argmax(1))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = F.cross_entropy(model(x), y) + 0.01 * model[1].balance
        loss.backward()
        for name, parameter in model.named_parameters():
            if "experts" not in name:
                dist.all_reduce(parameter.grad)
            parameter.grad /= size
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
