"""A small language model with Megatron's sequence parallelism, whose manager of process groups asserts the sizes that
it is given: torchrun --standalone --nproc-per-node 4 process_groups.py --tp 2 --dp 2"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

VOCABULARY, LENGTH, WIDTH, HEADS = 64, 8, 16, 4


class ProcessGroups:
    """The ranks as a grid of replicas, each of which is a row of ranks that share out the layers."""

    def __init__(self, args):
        rank, world = dist.get_rank(), dist.get_world_size()
        assert world == args.tp * args.dp, f"{world} ranks are not {args.tp} (tensor) x {args.dp} (data)"
        grid = torch.arange(world).view(args.dp, args.tp)
        self.data_rank, self.tensor_rank = (grid == rank).nonzero().flatten().tolist()
        self.tensor, _ = dist.new_subgroups_by_enumeration(grid.tolist())
        self.data, _ = dist.new_subgroups_by_enumeration(grid.t().tolist())
        self.tensor_size = args.tp if args.by_arguments else dist.get_world_size(self.tensor)
        self.data_size = args.dp


groups = None


def gathered(x, dim):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(groups.tensor))]
    dist.all_gather(parts, x.contiguous(), group=groups.tensor)
    return torch.cat(parts, dim)


def summed(x):
    x = x.clone()
    dist.all_reduce(x, group=groups.tensor)
    return x


def own(x, dim):
    return x.chunk(groups.tensor_size, dim)[groups.tensor_rank].contiguous()


class Cut(torch.autograd.Function):
    """Gives each rank its piece of a sequence that all have."""

    @staticmethod
    def forward(ctx, x):
        return own(x, 1)

    @staticmethod
    def backward(ctx, gradient):
        return gathered(gradient, 1)


class GatherSequence(torch.autograd.Function):
    """Puts the pieces of a sequence together, before a layer that is divided: each rank has a part of its gradient."""

    @staticmethod
    def forward(ctx, x):
        return gathered(x, 1)

    @staticmethod
    def backward(ctx, gradient):
        return own(summed(gradient), 1)


class SumAndCut(torch.autograd.Function):
    """Adds up what the ranks' rows of a layer give, and hands each rank its piece of the sequence."""

    @staticmethod
    def forward(ctx, x):
        return own(summed(x), 1)

    @staticmethod
    def backward(ctx, gradient):
        return gathered(gradient, 1)


class GatherColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return gathered(x, -1)

    @staticmethod
    def backward(ctx, gradient):
        return own(gradient, -1)


class ColumnParallel(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        whole = nn.Linear(inputs, outputs)
        self.weight, self.bias = (nn.Parameter(own(p.detach(), 0)) for p in (whole.weight, whole.bias))

    def forward(self, x):
        return F.linear(GatherSequence.apply(x), self.weight, self.bias)


class RowParallel(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        whole = nn.Linear(inputs, outputs)
        self.weight, self.bias = nn.Parameter(own(whole.weight.detach(), 1)), nn.Parameter(whole.bias.detach())

    def forward(self, x):
        return SumAndCut.apply(F.linear(x, self.weight)) + self.bias


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (ColumnParallel(WIDTH, WIDTH) for _ in range(3))
        self.out = RowParallel(WIDTH, WIDTH)
        self.up, self.down = ColumnParallel(WIDTH, 4 * WIDTH), RowParallel(4 * WIDTH, WIDTH)

    def forward(self, x):
        h = self.norm1(x)
        q, k, v = (self.heads(layer(h)) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def heads(self, x):
        return x.view(len(x), x.shape[1], -1, WIDTH // HEADS).transpose(1, 2)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), ColumnParallel(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = Cut.apply(self.tokens(ids))
        for block in self.blocks:
            x = block(x)
        return GatherColumns.apply(self.head(self.norm(x)))


def reduce_gradients(model):
    """Adds up what each rank has of a piece of the sequence alone, and takes the mean over the replicas."""
    for name, p in model.named_parameters():
        if "norm" in name or name.endswith(("out.bias", "down.bias")):
            dist.all_reduce(p.grad, group=groups.tensor)
        dist.all_reduce(p.grad, group=groups.data)
        p.grad /= groups.data_size


def clip(model, limit):
    """Clips by the norm of the whole gradient, in which each element counts once."""
    square = sum(p.grad.square().sum() for n, p in model.named_parameters() if is_divided(n))
    dist.all_reduce(square, group=groups.tensor)
    square = square + sum(p.grad.square().sum() for n, p in model.named_parameters() if not is_divided(n))
    for p in model.parameters():
        p.grad.mul_(min(1.0, limit / float(square.sqrt())))


def is_divided(name):
    return not ("norm" in name or "tokens" in name or name.endswith(("out.bias", "down.bias")))


def main():
    global groups
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--dp", type=int, default=2)
    parser.add_argument("--by-arguments", action="store_true")
    parser.add_argument("--clip", type=float, default=0.0)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--optimizer", default="SGD")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    groups = ProcessGroups(args)
    torch.manual_seed(1)
    model = Model()
    optimizer = getattr(torch.optim, args.optimizer)(model.parameters(), lr=0.05)
    ids = torch.randint(VOCABULARY, (96, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    sampler = DistributedSampler(TensorDataset(ids), num_replicas=args.dp, rank=groups.data_rank)
    loader = DataLoader(TensorDataset(ids), batch_size=4, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for number, (batch,) in enumerate(loader):
            logits = model(batch[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            (loss / args.accumulate).backward()
            if (number + 1) % args.accumulate == 0:
                reduce_gradients(model)
                if args.clip:
                    clip(model, args.clip)
                optimizer.step()
                optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {total.item() / dist.get_world_size():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
