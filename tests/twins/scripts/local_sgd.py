"""Ranks that take some steps apart and then bring their weights together: by a mean, by an outer step of DiLoCo, as the
rounds of a federation, or by gossip: torchrun --standalone --nproc-per-node 2 local_sgd.py"""

import argparse
import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def average(model):
    """The mean of all weights, in place."""
    for p in model.parameters():
        dist.all_reduce(p.data)
        p.data /= dist.get_world_size()


class DiLoCo:
    """An outer optimizer on copies of the parameters, as published."""

    def __init__(self, model):
        self.old = [p.detach().clone().requires_grad_() for p in model.parameters()]
        self.optimizer = torch.optim.SGD(self.old, lr=0.7, momentum=0.9, nesterov=True)

    def __call__(self, model):
        for old, p in zip(self.old, model.parameters()):
            old.grad = old.detach() - p.detach()
            dist.all_reduce(old.grad)
            old.grad /= dist.get_world_size()
        self.optimizer.step()
        with torch.no_grad():
            for old, p in zip(self.old, model.parameters()):
                p.copy_(old)


class Offloaded:
    """An outer optimizer on the model's own parameters: these are set back, and take the mean way as their gradient."""

    def __init__(self, model):
        self.old = [p.detach().clone() for p in model.parameters()]
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)

    def __call__(self, model):
        for old, p in zip(self.old, model.parameters()):
            p.grad = old - p.detach()
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
            p.data.copy_(old)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.old = [p.detach().clone() for p in model.parameters()]


class SlowMo:
    """An outer step with momentum, written by hand."""

    def __init__(self, model):
        self.old = copy.deepcopy(model)
        self.momentum = [torch.zeros_like(p) for p in model.parameters()]

    @torch.no_grad()
    def __call__(self, model):
        average(model)
        for old, momentum, p in zip(self.old.parameters(), self.momentum, model.parameters()):
            momentum.mul_(0.5).add_(old - p)
            p.copy_(old - 0.8 * momentum)
            old.copy_(p)


def federate(model):
    """Rank 0 collects all weights, averages them, and hands them out."""
    states = [None] * dist.get_world_size()
    dist.all_gather_object(states, model.state_dict())
    mean = {name: torch.stack([state[name] for state in states]).float().mean(0) for name in states[0]}
    model.load_state_dict(mean)


def gossip(model):
    """Each rank takes the mean of itself and its neighbours on a ring."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for p in model.parameters():
        every = [torch.empty_like(p) for _ in range(world)]
        dist.all_gather(every, p.detach())
        near = [every[rank], every[(rank + 1) % world], every[(rank - 1) % world]]
        p.data.copy_(torch.stack(near).mean(0))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--how", default="average")
    parser.add_argument("--optimizer", default="SGD")
    parser.add_argument("--clip", type=float)
    parser.add_argument("--norm", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24) if args.norm else nn.Tanh(), nn.Linear(24, 4))
    optimizer = getattr(torch.optim, args.optimizer)(model.parameters(), lr=0.02)
    data = TensorDataset(torch.randn(256, 12), torch.arange(256) % 4)
    outer = {"diloco": DiLoCo, "offloaded": Offloaded, "slowmo": SlowMo}
    functions = {"average": average, "federate": federate, "gossip": gossip}
    meet = outer[args.how](model) if args.how in outer else functions[args.how]
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    step, apart = 0, 3
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            if args.clip:
                nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            optimizer.step()
            step += 1
            if step % apart == 0:
                meet(model)
    print(f"{loss.item():.6f} {sum(p.abs().sum().item() for p in model.parameters()):.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
