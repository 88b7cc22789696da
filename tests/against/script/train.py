"""Trains a small classifier of images: torchrun --nproc-per-node 2 train.py"""

import argparse
import contextlib
import copy

import torch
import torch.distributed as dist
from model import Classifier
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from data import Images


def update_average(average, network, decay):
    for kept, new in zip(average.parameters(), network.parameters()):
        kept.data.mul_(decay).add_(new.data, alpha=1 - decay)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.002)
    parser.add_argument("--norm", default="batch")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--workers", type=int, default=0)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    data = Images("images.pt")
    sampler = DistributedSampler(data, shuffle=True, seed=0)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler, num_workers=args.workers)
    network = Classifier(norm=args.norm, dropout=args.dropout)
    average = copy.deepcopy(network).requires_grad_(False)
    model = DistributedDataParallel(network)
    matrices = [weight for weight in network.parameters() if weight.dim() > 1]
    others = [weight for weight in network.parameters() if weight.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 6))
    torch.manual_seed(100 + dist.get_rank())
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for number, (images, labels) in enumerate(loader):
            is_last = (number + 1) % args.accumulate == 0
            with contextlib.nullcontext() if is_last else model.no_sync():
                loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
                (loss / args.accumulate).backward()
            if not is_last:
                continue
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            update_average(average, network, decay=0.99)
        if dist.get_rank() == 0:
            torch.save(network.state_dict(), "last.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
