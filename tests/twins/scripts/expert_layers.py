"""A mixture of experts whose experts live on different ranks, with all_to_all:
torchrun --standalone --nproc-per-node 2 expert_layers.py"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

INPUTS, WIDTH, EXPERTS, CLASSES = 12, 16, 4, 4


class Exchange(torch.autograd.Function):
    """Sends rows to the ranks of their experts; the gradients come back the same way."""

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


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, rows):
        return self.down(F.silu(self.up(rows)))


class Mixture(nn.Module):
    def __init__(self, local):
        super().__init__()
        world, rank = dist.get_world_size(), dist.get_rank()
        self.each = EXPERTS // world
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        experts = [Expert() for _ in range(EXPERTS)]
        mine = range(rank * self.each, (rank + 1) * self.each)
        if local:
            self.experts = nn.ModuleList(experts[number] for number in mine)
        else:
            self.experts = nn.ModuleDict({f"expert {number}": experts[number] for number in mine})

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=EXPERTS)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        world = dist.get_world_size()
        sent = counts.view(world, -1).sum(1).tolist()
        received = theirs.view(world, -1).sum(1).tolist()
        rows = Exchange.apply(x[order], received, sent)
        numbers = torch.arange(self.each).repeat(world).repeat_interleave(theirs)
        output = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts.values() if hasattr(self.experts, "values") else self.experts):
            output = output.index_add(0, (numbers == number).nonzero()[:, 0], expert(rows[numbers == number]))
        output = Exchange.apply(output, sent, received)[order.argsort()]
        return x + weights[:, None] * output


class Model(nn.Module):
    def __init__(self, local):
        super().__init__()
        self.inputs, self.mixture = nn.Linear(INPUTS, WIDTH), Mixture(local)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.head(self.norm(self.mixture(self.inputs(x))))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local", action="store_true")
    parser.add_argument("--optimizer", default="SGD")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = Model(args.local)
    lr = 0.05
    optimizer = getattr(torch.optim, args.optimizer)(model.parameters(), lr=lr)
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(192, INPUTS, generator=generator), torch.arange(192) % CLASSES)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            for name, p in model.named_parameters():
                if p.grad is None:
                    continue  # of an expert that no row has chosen
                if "experts" in name:
                    p.grad /= world  # it holds the sum over all ranks' rows
                else:
                    dist.all_reduce(p.grad)
                    p.grad /= world
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: {loss.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
