"""A pipeline of two stages with send and receive by hand, and its replicas:
torchrun --standalone --nproc-per-node 2 stages_by_hand.py"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

INPUTS, WIDTH, CLASSES, STAGES = 12, 16, 4, 2


class Stage(nn.Module):
    """Half of the layers, each half numbered from 0."""

    def __init__(self, stage):
        super().__init__()
        ends = INPUTS if stage == 0 else WIDTH, CLASSES if stage == STAGES - 1 else WIDTH
        self.layers = nn.Sequential(nn.Linear(ends[0], WIDTH), nn.GELU(), nn.Linear(WIDTH, ends[1]))

    def forward(self, x):
        return self.layers(x)


def hand_on(operation, tensor, peer):
    for request in dist.batch_isend_irecv([dist.P2POp(operation, tensor, peer)]):
        request.wait()
    return tensor


def train_stage(model, stage, peer, x, y, parts):
    """The forward and the backward pass of each micro-batch, one after the other."""
    for rows, labels in zip(x.chunk(parts), y.chunk(parts)):
        if stage == 0:
            output = model(rows)
            hand_on(dist.isend, output.detach(), peer)
            output.backward(hand_on(dist.irecv, torch.empty_like(output), peer))
        else:
            given = hand_on(dist.irecv, torch.empty(len(rows), WIDTH), peer).requires_grad_()
            (F.cross_entropy(model(given), labels) / parts).backward()
            hand_on(dist.isend, given.grad, peer)


def clip(model, limit, stages):
    square = sum(p.grad.square().sum() for p in model.parameters())
    dist.all_reduce(square, group=stages)
    nn.utils.clip_grads_with_norm_(model.parameters(), limit, square.sqrt())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", type=int, default=2)
    parser.add_argument("--clip", type=float, default=0.0)
    parser.add_argument("--optimizer", default="SGD")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, replicas = dist.get_rank(), dist.get_world_size() // STAGES
    replica, stage = divmod(rank, STAGES)
    peer = rank + 1 if stage == 0 else rank - 1
    of_stages = [dist.new_group([STAGES * r + s for r in range(replicas)]) for s in range(STAGES)]
    of_replicas = [dist.new_group([STAGES * r + s for s in range(STAGES)]) for r in range(replicas)]
    torch.manual_seed(1)
    model = [Stage(number) for number in range(STAGES)][stage]
    optimizer = getattr(torch.optim, args.optimizer)(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(192, INPUTS, generator=generator), torch.arange(192) % CLASSES)
    sampler = DistributedSampler(data, num_replicas=replicas, rank=replica)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            train_stage(model, stage, peer, x, y, args.parts)
            for p in model.parameters():
                dist.all_reduce(p.grad, group=of_stages[stage])
                p.grad /= replicas
            if args.clip:
                clip(model, args.clip, of_replicas[replica])
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
