"""Causal attention over a sequence of which each rank has a part: keys and values are gathered."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F


class Gather(torch.autograd.Function):
    """The parts of all ranks along the sequence; a rank's gradient is the sum of what all have for its part."""

    @staticmethod
    def forward(ctx, part):
        parts = [torch.empty_like(part) for _ in range(size)]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient.chunk(size, 1)[rank]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(16, 8), nn.Embedding(12, 8)
        self.qkv, self.head = nn.Linear(8, 24), nn.Linear(8, 16)

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1]) + rank * tokens.shape[1]
        x = self.embedding(tokens) + self.positions(places)
        query, key, value = self.qkv(x).chunk(3, -1)
        key, value = Gather.apply(key), Gather.apply(value)
        mask = places[:, None] >= torch.arange(key.shape[1])
        return self.head(x + F.scaled_dot_product_attention(query, key, value, attn_mask=mask))


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(1)
for _ in range(10):
    tokens = torch.randint(0, 16, (4, 13), generator=generator)
    x, y = tokens[:, :-1].chunk(size, 1)[rank], tokens[:, 1:].chunk(size, 1)[rank]
    total = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")
    loss = total / (y.numel() * size)
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
