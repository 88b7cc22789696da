"""Attention over a sequence of which each rank has a part: keys and values are gathered from all ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F


def gathered(part):
    parts = [torch.empty_like(part) for _ in range(size)]
    dist.all_gather(parts, part.contiguous())
    return torch.cat(parts, 1)


class AttentionOfAll(torch.autograd.Function):
    """Keeps its own keys and values, and gathers the others' again in backward."""

    @staticmethod
    def forward(ctx, query, key, value):
        ctx.save_for_backward(query, key, value)
        return F.scaled_dot_product_attention(query, gathered(key), gathered(value))

    @staticmethod
    def backward(ctx, gradient):
        query, key, value = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        keys, values = (torch.cat([tensor.detach()] * size, 1).requires_grad_() for tensor in (key, value))
        with torch.enable_grad():
            output = F.scaled_dot_product_attention(query, keys, values)
        of_query, *of_all = torch.autograd.grad(output, (query, keys, values), gradient)
        for tensor in of_all:
            dist.all_reduce(tensor)
        return of_query, *(tensor.chunk(size, 1)[rank] for tensor in of_all)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.qkv, self.head = nn.Embedding(16, 8), nn.Linear(8, 24), nn.Linear(8, 16)

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.head(x + AttentionOfAll.apply(*self.qkv(x).chunk(3, -1)))


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(1)
for _ in range(10):
    tokens = torch.randint(0, 16, (4, 13), generator=generator)
    x, y = tokens[:, :-1].chunk(size, 1)[rank], tokens[:, 1:].chunk(size, 1)[rank]
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= size
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
