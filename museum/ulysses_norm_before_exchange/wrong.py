"""A norm of keys, and their exchange for those of all positions of some heads, as one function (Ulysses)."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F


def swap(x, cut, joined):
    """Cuts one dimension over the ranks, and puts their parts together along another one."""
    sent = torch.stack(x.chunk(size, cut)).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    return torch.cat(list(received), joined)


class Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cut, joined):
        ctx.dims = cut, joined
        return swap(x, cut, joined)

    @staticmethod
    def backward(ctx, gradient):
        cut, joined = ctx.dims
        return swap(gradient, joined, cut), None, None


class NormAndSwap(torch.autograd.Function):
    """Norms the keys of a rank's part of the sequence, and swaps them for all positions of its heads."""

    @staticmethod
    def forward(ctx, key, weight):
        ctx.save_for_backward(key, weight)
        return swap(F.rms_norm(key, key.shape[-1:], weight), 1, 2)

    @staticmethod
    def backward(ctx, gradient):
        key, weight = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        collected = gradient.reshape(key.shape)
        with torch.enable_grad():
            normed = F.rms_norm(key, key.shape[-1:], weight)
        return torch.autograd.grad(normed, (key, weight), collected)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.qkv, self.head = nn.Embedding(16, 8), nn.Linear(8, 24), nn.Linear(8, 16)
        self.norm = nn.Parameter(torch.ones(4))

    def forward(self, tokens):
        x = self.embedding(tokens)
        heads = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        query, value = (Swap.apply(part, 1, 2) for part in (heads[0], heads[2]))
        key = NormAndSwap.apply(heads[1], self.norm)
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.head(x + Swap.apply(output, 2, 1).transpose(1, 2).flatten(2))


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
