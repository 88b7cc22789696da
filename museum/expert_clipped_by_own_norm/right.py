"""A mixture of experts that live on different ranks, clipped by the norm of the whole gradient."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EXPERTS = 4


class Exchange(torch.autograd.Function):
    """Sends rows to the ranks of their experts; their gradients come back the same way."""

    @staticmethod
    def forward(ctx, rows, received, sent):
        ctx.sizes = received, sent
        output = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(output, rows.contiguous(), received, sent)
        return output

    @staticmethod
    def backward(ctx, gradient):
        received, sent = ctx.sizes
        output = gradient.new_empty(sum(sent), gradient.shape[1])
        dist.all_to_all_single(output, gradient.contiguous(), sent, received)
        return output, None, None


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(8, EXPERTS, bias=False)
        experts = [nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(EXPERTS)]
        mine = range(rank * EXPERTS // size, (rank + 1) * EXPERTS // size)
        self.experts = nn.ModuleDict({f"expert {number}": experts[number] for number in mine})

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=EXPERTS)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        sent, received = counts.view(size, -1).sum(1).tolist(), theirs.view(size, -1).sum(1).tolist()
        rows = Exchange.apply(x[order], received, sent)
        numbers = torch.arange(len(self.experts)).repeat(size).repeat_interleave(theirs)
        output = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts.values()):
            output = output.index_add(0, (numbers == number).nonzero()[:, 0], expert(rows[numbers == number]))
        return x + weights[:, None] * Exchange.apply(output, sent, received)[order.argsort()]


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
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        for name, parameter in model.named_parameters():
            if "experts" not in name:
                dist.all_reduce(parameter.grad)
            parameter.grad /= size
        squares = sum(p.grad.square().sum() for name, p in model.named_parameters() if "experts" in name)
        dist.all_reduce(squares)
        squares += sum(p.grad.square().sum() for name, p in model.named_parameters() if "experts" not in name)
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, squares.sqrt())
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
