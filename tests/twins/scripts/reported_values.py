"""Evaluation of rows that are shared out without padding: what is printed, and what a schedule decides by."""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--rows", type=int, default=32)
args = parser.parse_args()


def gathered(tensor):
    """Returns the rows of all ranks, which may have different numbers of them."""
    parts = [None] * world
    dist.all_gather_object(parts, tensor)
    return torch.cat(parts)


def auroc(scores, targets):
    positive, negative = scores[targets == 1], scores[targets == 0]
    return (positive[:, None] > negative[None]).double().mean()


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(64 + args.rows, 8)
y = (x.sum(1) + torch.randn(len(x)) * 3 > 0).long()
train, val = TensorDataset(x[:64], y[:64]), TensorDataset(x[64:], y[64:])
sampler = DistributedSampler(train, seed=1)
loader = DataLoader(train, batch_size=8, sampler=sampler)
val_loader = DataLoader(Subset(val, range(rank, len(val), world)), batch_size=4)
model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=3)
for epoch in range(8):
    start, train_loss = time.time(), 0.0
    model.train()
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        train_loss += loss.item() / len(loader)
    model.eval()
    val_loss, correct, rows = torch.zeros(3).unbind()
    scores, labels = [], []
    with torch.no_grad():
        for inputs, targets in val_loader:
            logits = model.module(inputs)
            val_loss += F.cross_entropy(logits, targets, reduction="sum")
            correct += (logits.argmax(1) == targets).sum()
            rows += len(targets)
            scores.append(logits.softmax(1)[:, 1])
            labels.append(targets)
    scores, labels = torch.cat(scores), torch.cat(labels)
    for total in (val_loss, correct, rows):
        dist.all_reduce(total)
    value = auroc(gathered(scores), gathered(labels))
    plateau.step(val_loss / rows)
    if rank == 0:
        print(f"epoch {epoch}: train {train_loss:.3f} in {time.time() - start:.2f} s", flush=True)
        print(f"val {val_loss / rows:.4f}, accuracy {correct / rows:.2%}, AUROC {value:.4f}", flush=True)
dist.destroy_process_group()
