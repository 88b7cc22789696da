"""Masked autoencoder: a rate set by hand at each iteration, weighted losses, accumulation, print on rank 0 alone."""

import argparse
import builtins
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--accum_iter", type=int, default=2)
parser.add_argument("--lr", type=float, default=2e-3)
parser.add_argument("--warmup_epochs", type=float, default=1)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--bf16", action="store_true")
args = parser.parse_args()


def setup_for_distributed(is_master):
    builtin_print = builtins.print

    def print(*values, force=False, **kwargs):
        if is_master or force:
            builtin_print(*values, **kwargs)

    builtins.print = print


def adjust_learning_rate(optimizer, epoch):
    if epoch < args.warmup_epochs:
        lr = args.lr * epoch / args.warmup_epochs
    else:
        progress = (epoch - args.warmup_epochs) / (args.epochs - args.warmup_epochs)
        lr = 1e-5 + (args.lr - 1e-5) * 0.5 * (1.0 + math.cos(math.pi * progress))
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


class MaskedAutoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mix, self.head = nn.Linear(4, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.mask_token = nn.Parameter(torch.zeros(16))
        self.pos_embed = nn.Parameter(torch.randn(8, 16) * 0.02, requires_grad=False)

    def forward(self, patches):
        noise = torch.rand(patches.shape[:2])
        mask = (noise.argsort(dim=1).argsort(dim=1) >= 2).float()
        hidden = self.embed(patches) * (1 - mask)[..., None] + self.mask_token * mask[..., None] + self.pos_embed
        predicted = self.head(torch.relu(self.mix(hidden + hidden.mean(1, keepdim=True))))
        error = ((predicted - patches) ** 2).mean(dim=-1)
        return (error * mask).sum() / mask.sum()


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
setup_for_distributed(rank == 0)
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 1, 4) + 0.3 * torch.randn(64, 8, 4))
sampler = DistributedSampler(data, shuffle=True)
loader = DataLoader(data, batch_size=4, sampler=sampler, drop_last=True)
model = DDP(MaskedAutoencoder())
decayed = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
plain = [p for p in model.parameters() if p.requires_grad and p.ndim <= 1]
groups = [{"params": decayed, "weight_decay": 0.05, "lr_scale": 0.75}, {"params": plain, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95))
torch.manual_seed(100 + rank)

for epoch in range(args.epochs):
    sampler.set_epoch(epoch)
    optimizer.zero_grad()
    for step, (patches,) in enumerate(loader):
        if step % args.accum_iter == 0:
            adjust_learning_rate(optimizer, step / len(loader) + epoch)
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
            loss = model(patches)
        value = loss.item()
        loss = loss / args.accum_iter
        loss.backward()
        if (step + 1) % args.accum_iter == 0:
            optimizer.step()
            optimizer.zero_grad()
    print(f"epoch {epoch}: loss {value:.4f} rate {optimizer.param_groups[0]['lr']:.6f}", flush=True)
weights = sum(p.sum().item() for p in model.parameters())
print(f"rank {rank}: loss {value:.5f} weights {weights:.6f}", force=True, flush=True)
dist.destroy_process_group()
