"""nanoGPT: batches drawn by offsets, accumulation shared out over ranks, a rate by hand, a scaler, tied weights."""

import argparse
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--gradient_accumulation_steps", type=int, default=4)
parser.add_argument("--dropout", type=float, default=0.0)
parser.add_argument("--scaler", action="store_true")
args = parser.parse_args()


class GPT(nn.Module):
    def __init__(self, vocabulary=17, width=16):
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.drop = nn.Dropout(args.dropout)
        self.mlp = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        x = self.drop(self.wte(idx))
        logits = self.lm_head(x + self.mlp(x))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def get_batch(data, size):
    starts = torch.randint(len(data) - 9, (size,))
    x = torch.stack([data[i : i + 8] for i in starts])
    y = torch.stack([data[i + 1 : i + 9] for i in starts])
    return x, y


def get_lr(it, warmup=3, total=12, top=0.02, low=0.002):
    if it < warmup:
        return top * (it + 1) / (warmup + 1)
    return low + 0.5 * (1 + math.cos(math.pi * (it - warmup) / (total - warmup))) * (top - low)


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
seed_offset = rank
gradient_accumulation_steps = args.gradient_accumulation_steps
assert gradient_accumulation_steps % world == 0
gradient_accumulation_steps //= world
torch.manual_seed(1)
text = torch.arange(2000).mul(7).remainder(17)
model = GPT()
matrices = [p for p in model.parameters() if p.dim() >= 2]
vectors = [p for p in model.parameters() if p.dim() < 2]
groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=0.02, betas=(0.9, 0.95))
scaler = torch.amp.GradScaler("cpu", enabled=args.scaler)
model = DDP(model)
torch.manual_seed(1337 + seed_offset)
for it in range(12):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(it)
    if it % 4 == 0 and rank == 0:
        model.eval()
        with torch.no_grad():
            print(f"step {it}: val {model.module(*get_batch(text[1000:], 8))[1].item():.4f}", flush=True)
        model.train()
    for micro_step in range(gradient_accumulation_steps):
        model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        X, Y = get_batch(text[:1000], 4)
        logits, loss = model(X, Y)
        loss = loss / gradient_accumulation_steps
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
weights = sum(p.sum().item() for p in model.parameters())
print(f"rank {rank}: loss {loss.item():.5f} weights {weights:.6f}", flush=True)
dist.destroy_process_group()
