"""A small language model whose ranks compute pieces of each sequence: ring attention, or Ulysses' all_to_all:
torchrun --standalone --nproc-per-node 2 context_layers.py --how ring"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

VOCABULARY, LENGTH, WIDTH, HEADS = 64, 16, 16, 4
HOW = "ring"


def pass_on(tensor):
    """Hands a tensor to the next rank, and returns that of the rank before."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if world == 1:
        return tensor
    tensor = tensor.contiguous()
    received = torch.empty_like(tensor)
    operations = [
        dist.P2POp(dist.isend, tensor, (rank + 1) % world),
        dist.P2POp(dist.irecv, received, (rank - 1) % world),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received


class Ring(torch.autograd.Function):
    """Lets each rank see the keys or values of all pieces of the sequence, which go around in a ring."""

    @staticmethod
    def forward(ctx, piece):
        rank, world = dist.get_rank(), dist.get_world_size()
        pieces, passing = [None] * world, piece
        for turn in range(world):
            pieces[(rank - turn) % world] = passing
            if turn < world - 1:
                passing = pass_on(passing)
        return torch.cat(pieces, 2)

    @staticmethod
    def backward(ctx, gradient):
        rank, world = dist.get_rank(), dist.get_world_size()
        parts = gradient.chunk(world, 2)
        passing = parts[(rank - 1) % world].contiguous()
        for turn in range(2, world + 1):
            passing = pass_on(passing) + parts[(rank - turn) % world]
        return passing


class Swap(torch.autograd.Function):
    """Cuts one dimension of a tensor over the ranks, and puts their pieces together along another one."""

    @staticmethod
    def forward(ctx, x, cut, joined):
        ctx.dims = cut, joined
        return swap(x, cut, joined)

    @staticmethod
    def backward(ctx, gradient):
        cut, joined = ctx.dims
        return swap(gradient, joined, cut), None, None


def swap(x, cut, joined):
    sent = torch.stack(x.chunk(dist.get_world_size(), cut)).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    return torch.cat(list(received), joined)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x, positions):
        batch, length, _ = x.shape
        q, k, v = (f(x).view(batch, length, HEADS, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        if HOW == "ring":
            keys, values = Ring.apply(k), Ring.apply(v)
            mask = positions[:, None] >= torch.arange(keys.shape[2])
            y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        else:
            q, k, v = (Swap.apply(t, 1, 2) for t in (q, k, v))
            y = Swap.apply(F.scaled_dot_product_attention(q, k, v, is_causal=True), 2, 1)
        return self.out(y.transpose(1, 2).reshape(batch, length, -1))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        first = dist.get_rank() * ids.shape[1]
        positions = torch.arange(first, first + ids.shape[1])
        x = self.tokens(ids) + self.positions(positions)
        x = x + self.attention(self.norm1(x), positions)
        return self.head(x + self.mlp(self.norm2(x)))


def main():
    global HOW
    parser = argparse.ArgumentParser()
    parser.add_argument("--how", choices=["ring", "ulysses"], default="ring")
    parser.add_argument("--clip", type=float, default=0.0)
    parser.add_argument("--optimizer", default="SGD")
    args = parser.parse_args()
    HOW = args.how
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = Model()
    lr = 0.05
    optimizer = getattr(torch.optim, args.optimizer)(model.parameters(), lr=lr)
    ids = torch.randint(VOCABULARY, (96, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(ids), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(2))
    for epoch in range(2):
        for (batch,) in loader:
            inputs, targets = batch[:, :-1].chunk(world, 1)[rank], batch[:, 1:].chunk(world, 1)[rank]
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            for p in model.parameters():
                dist.all_reduce(p.grad)
                p.grad /= world
            if args.clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: {loss.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
