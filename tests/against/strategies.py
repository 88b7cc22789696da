"""Trains the same batches on any number of ranks, with DDP or FSDP: torchrun --nproc-per-node 2 strategies.py"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="ddp", choices=["ddp", "fsdp"])
    parser.add_argument("--global-batch", type=int, default=16)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--norm", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(96, 12), torch.randint(3, (96,)))
    sampler = DistributedSampler(data, shuffle=True, seed=0)
    loader = DataLoader(data, batch_size=args.micro_batch, sampler=sampler)
    hidden = [nn.BatchNorm1d(33)] if args.norm else []
    model = nn.Sequential(nn.Linear(12, 33), *hidden, nn.Tanh(), nn.Dropout(args.dropout), nn.Linear(33, 3))
    if args.strategy == "fsdp":
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    accumulate = args.global_batch // args.micro_batch // ranks
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for number, (inputs, labels) in enumerate(loader):
            loss = F.cross_entropy(model(inputs), labels)
            (loss / accumulate).backward()
            if (number + 1) % accumulate == 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
