"""minimind's fine-tuning: a loss mask, autocast, a scaler, accumulation, a rate by hand, an auxiliary loss."""

import argparse
import math
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--accumulation_steps", type=int, default=2)
parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
parser.add_argument("--learning_rate", type=float, default=5e-3)
args = parser.parse_args()


def get_lr(current_step, total_steps, lr):
    return lr / 10 + 0.5 * lr * (1 + math.cos(math.pi * current_step / total_steps))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.gate = nn.Embedding(19, 16), nn.Linear(16, 2)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Linear(16, 19)

    def forward(self, tokens):
        x = self.embedding(tokens)
        gates = self.gate(x).softmax(-1)
        x = x + sum(gates[..., i : i + 1] * torch.relu(expert(x)) for i, expert in enumerate(self.experts))
        return self.head(x), (gates - 0.5).square().mean()


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1337)
tokens = torch.randint(0, 19, (64, 9))
mask = torch.zeros(64, 8).index_fill_(1, torch.tensor([3, 4, 5, 6, 7]), 1.0)
data = TensorDataset(tokens[:, :-1], tokens[:, 1:], mask)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=4, sampler=sampler)
model = DDP(Model())
scaler = torch.amp.GradScaler("cpu", enabled=args.dtype == "float16")
optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
loss_fct = nn.CrossEntropyLoss(reduction="none")
context = torch.autocast("cpu", torch.bfloat16) if args.dtype == "bfloat16" else nullcontext()
epochs, iter_per_epoch = 3, len(loader)
for epoch in range(epochs):
    sampler.set_epoch(epoch)
    for step, (X, Y, loss_mask) in enumerate(loader):
        lr = get_lr(epoch * iter_per_epoch + step, epochs * iter_per_epoch, args.learning_rate)
        for param_group in optimizer.param_groups:
            param_group["lr"] = lr
        with context:
            logits, aux_loss = model(X)
            loss = loss_fct(logits.view(-1, logits.size(-1)), Y.view(-1)).view(Y.size())
            loss = (loss * loss_mask).sum() / loss_mask.sum()
            loss = loss + 0.1 * aux_loss
            loss = loss / args.accumulation_steps
        scaler.scale(loss).backward()
        if (step + 1) % args.accumulation_steps == 0:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
weights = sum(p.sum().item() for p in model.parameters())
print(f"rank {rank}: loss {loss.item():.5f} weights {weights:.6f}", flush=True)
dist.destroy_process_group()
