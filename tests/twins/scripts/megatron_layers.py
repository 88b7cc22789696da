"""A small language model in hand-written tensor-parallel layers, as Megatron and picotron have them, with a data axis:
torchrun --standalone --nproc-per-node 2 megatron_layers.py --tp 2"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

VOCABULARY, LENGTH, WIDTH, HEADS = 64, 8, 16, 4
TENSOR = None  # the group of the ranks that share out a layer


class Copy(torch.autograd.Function):
    """Hands an input to each rank; its gradients are added up."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=TENSOR)
        return gradient


class Reduce(torch.autograd.Function):
    """Adds up what the ranks have computed; its gradient is each rank's."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x, group=TENSOR)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Gather(torch.autograd.Function):
    """Puts the ranks' columns beside each other; a rank takes the gradient of its own."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(TENSOR))]
        dist.all_gather(parts, x.contiguous(), group=TENSOR)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.chunk(dist.get_world_size(TENSOR), -1)[dist.get_rank(TENSOR)].contiguous()


def piece(weight, dim):
    """Returns this rank's piece of a whole weight, which all ranks draw alike."""
    return nn.Parameter(weight.chunk(dist.get_world_size(TENSOR), dim)[dist.get_rank(TENSOR)].clone())


class ColumnParallel(nn.Module):
    def __init__(self, inputs, outputs, gather=False):
        super().__init__()
        whole = nn.Linear(inputs, outputs)
        self.weight, self.bias = piece(whole.weight, 0), piece(whole.bias, 0)
        self.gather = gather

    def forward(self, x):
        y = F.linear(Copy.apply(x), self.weight, self.bias)
        return Gather.apply(y) if self.gather else y


class RowParallel(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        whole = nn.Linear(inputs, outputs)
        self.weight, self.bias = piece(whole.weight, 1), nn.Parameter(whole.bias.detach().clone())

    def forward(self, x):
        y = Reduce.apply(F.linear(x, self.weight))
        return y + self.bias


class VocabParallelEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = piece(nn.Embedding(VOCABULARY, WIDTH).weight, 0)
        self.first = dist.get_rank(TENSOR) * len(self.weight)

    def forward(self, ids):
        outside = (ids < self.first) | (ids >= self.first + len(self.weight))
        rows = F.embedding((ids - self.first).masked_fill(outside, 0), self.weight)
        return Reduce.apply(rows.masked_fill(outside[..., None], 0.0))


class Block(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (ColumnParallel(WIDTH, WIDTH) for _ in range(3))
        self.out = RowParallel(WIDTH, WIDTH)
        self.up, self.down = ColumnParallel(WIDTH, 4 * WIDTH), RowParallel(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        batch, length, _ = x.shape
        h = self.norm1(x)
        q, k, v = (f(h).view(batch, length, -1, WIDTH // HEADS).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(y.transpose(1, 2).reshape(batch, length, -1)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class Model(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.tokens = VocabParallelEmbedding()
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), ColumnParallel(WIDTH, VOCABULARY, gather=True)

    def forward(self, ids):
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def clip(model, limit):
    """Clips by the norm of the whole gradient, in which each element counts once."""
    divided = [p for n, p in model.named_parameters() if is_divided(n)]
    copies = [p for n, p in model.named_parameters() if not is_divided(n)]
    square = sum(p.grad.square().sum() for p in divided)
    dist.all_reduce(square, group=TENSOR)
    square = square + sum(p.grad.square().sum() for p in copies)
    for p in model.parameters():
        p.grad.mul_(min(1.0, limit / float(square.sqrt())))


def is_divided(name):
    return not ("norm" in name or name.endswith(("out.bias", "down.bias")))


def main():
    global TENSOR
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--clip", type=float, default=0.0)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--optimizer", default="SGD")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    assert world % args.tp == 0, "the ranks are a whole number of replicas"
    for first in range(0, world, args.tp):
        ranks = list(range(first, first + args.tp))
        group = dist.new_group(ranks)
        if rank in ranks:
            TENSOR = group
    for place in range(args.tp):
        ranks = list(range(place, world, args.tp))
        group = dist.new_group(ranks)
        if rank in ranks:
            data_group = group
    replica, replicas = rank // args.tp, world // args.tp
    torch.manual_seed(1)
    model = Model(args.dropout)
    torch.manual_seed(2 + replica)
    lr = 0.05
    optimizer = getattr(torch.optim, args.optimizer)(model.parameters(), lr=lr)
    ids = torch.randint(VOCABULARY, (96, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    data = TensorDataset(ids)
    sampler = DistributedSampler(data, num_replicas=replicas, rank=replica)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for number, (batch,) in enumerate(loader):
            logits = model(batch[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            loss = loss / args.accumulate
            loss.backward()
            if (number + 1) % args.accumulate == 0:
                for p in model.parameters():
                    dist.all_reduce(p.grad, group=data_group)
                    p.grad /= dist.get_world_size(data_group)
                if args.clip:
                    clip(model, args.clip)
                optimizer.step()
                optimizer.zero_grad()
        if rank == 0:
            print(f"epoch {epoch}: {loss.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
