"""DDP as in the tutorials: sampler, warm-up and cosine schedule, clipping, evaluation of all rows, checkpoints."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--optimizer", default="sgd", choices=["sgd", "adamw"])
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--smoothing", type=float, default=0.0)
parser.add_argument("--look-first", action="store_true")
args = parser.parse_args()

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(77, 8)
y = (x[:, :2].sum(1) > 0).long()
train_data, val_data = TensorDataset(x[:48], y[:48]), TensorDataset(x[48:], y[48:])
sampler = DistributedSampler(train_data, seed=1)
train_loader = DataLoader(train_data, batch_size=6, sampler=sampler, num_workers=args.workers)
val_loader = DataLoader(Subset(val_data, range(rank, len(val_data), world)), batch_size=5)

model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)))
if args.optimizer == "sgd":
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
else:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs * len(train_loader))

for epoch in range(args.epochs):
    model.train()
    if args.look_first:
        print(f"rank {rank} reads batches of {len(next(iter(train_loader))[0])}")
    sampler.set_epoch(epoch)
    for inputs, targets in train_loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets, label_smoothing=args.smoothing)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
    model.eval()
    counts = torch.zeros(2)
    with torch.no_grad():
        for inputs, targets in val_loader:
            counts[0] += (model.module(inputs).argmax(1) == targets).sum()
            counts[1] += len(targets)
    dist.all_reduce(counts)
    accuracy = counts[0] / len(val_data)
    if rank == 0:
        torch.save(model.module.state_dict(), "last.pt")
        print(f"epoch {epoch}: accuracy {accuracy:.4f}", flush=True)
weights = sum(p.sum().item() for p in model.parameters())
print(f"rank {rank}: loss {loss.item():.5f} weights {weights:.6f} files {len(os.listdir('.'))}", flush=True)
dist.destroy_process_group()
