"""FSDP2 and tensor parallelism on a mesh of two dimensions: torchrun --standalone --nproc-per-node 4 fsdp_tensor.py"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Block(nn.Module):
    def __init__(self, width, dropout):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Model(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.blocks = nn.ModuleList(Block(16, dropout) for _ in range(2))
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def reduce_by_hand(model, mesh):
    group = mesh["dp"].get_group()
    for parameter in model.parameters():
        gradient = parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad
        dist.all_reduce(gradient, group=group)
        gradient /= mesh["dp"].size()


def clip(model, limit):
    norms = [torch.linalg.vector_norm(p.grad) for p in model.parameters()]
    total = torch.stack([norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]).norm()
    for p in model.parameters():
        p.grad.mul_(min(1.0, limit / float(total)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--by-hand", action="store_true")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--clip", type=float, default=0.0)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--optimizer", default="SGD")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    assert world % args.tp == 0, f"{world} ranks cannot be divided by {args.tp}"
    dp = world // args.tp
    mesh = init_device_mesh("cpu", (dp, args.tp), mesh_dim_names=("dp", "tp"))
    dp_rank = mesh["dp"].get_local_rank()
    torch.manual_seed(1)
    model = Model(args.dropout)
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if not args.by_hand:
            fully_shard(block, mesh=mesh["dp"])
    if not args.by_hand:
        fully_shard(model, mesh=mesh["dp"])
    torch.manual_seed(100 + dp_rank)
    optimizer = getattr(torch.optim, args.optimizer)(model.parameters(), lr=0.05)
    inputs = torch.randn(96, 16, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, inputs[:, :4].argmax(1))
    sampler = DistributedSampler(data, num_replicas=dp, rank=dp_rank, seed=3)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for number, (batch, targets) in enumerate(loader):
            loss = F.cross_entropy(model(batch), targets)
            (loss / args.accumulate).backward()
            if (number + 1) % args.accumulate == 0:
                if args.by_hand:
                    reduce_by_hand(model, mesh)
                if args.clip:
                    clip(model, args.clip)
                optimizer.step()
                optimizer.zero_grad()
        if rank == 0:
            print(f"epoch {epoch}: {loss.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
