"""build-nanogpt: a loader that walks through the tokens by rank, accumulation, and validation by all ranks."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--micro", type=int, default=2)
args = parser.parse_args()
B, T = 2, 8


class DataLoaderLite:
    def __init__(self, tokens, process_rank, num_processes):
        self.tokens, self.process_rank, self.num_processes = tokens, process_rank, num_processes
        self.reset()

    def reset(self):
        self.current_position = B * T * self.process_rank

    def next_batch(self):
        buffer = self.tokens[self.current_position : self.current_position + B * T + 1]
        x, y = buffer[:-1].view(B, T), buffer[1:].view(B, T)
        self.current_position += B * T * self.num_processes
        if self.current_position + (B * T * self.num_processes + 1) > len(self.tokens):
            self.current_position = B * T * self.process_rank
        return x, y


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.fc = nn.Embedding(13, 16), nn.Linear(16, 16)
        self.lm_head = nn.Linear(16, 13, bias=False)

    def forward(self, idx, targets):
        logits = self.lm_head(torch.tanh(self.fc(self.wte(idx))))
        return logits, F.cross_entropy(logits.view(-1, 13), targets.view(-1))


dist.init_process_group("gloo")
ddp_rank, ddp_world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1337)
tokens = torch.randint(0, 13, (900,)).cumsum(0).remainder(13)
train_loader = DataLoaderLite(tokens[:700], ddp_rank, ddp_world_size)
val_loader = DataLoaderLite(tokens[700:], ddp_rank, ddp_world_size)
model = DDP(GPT())
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), eps=1e-8)
for step in range(12):
    if step % 4 == 0:
        model.eval()
        val_loader.reset()
        with torch.no_grad():
            val_loss_accum = 0.0
            for _ in range(3):
                _, loss = model(*val_loader.next_batch())
                val_loss_accum += loss.detach() / 3
        dist.all_reduce(val_loss_accum, op=dist.ReduceOp.SUM)
        val_loss_accum /= ddp_world_size
        if ddp_rank == 0:
            print(f"step {step}: validation {val_loss_accum.item():.4f}", flush=True)
    model.train()
    optimizer.zero_grad()
    loss_accum = torch.zeros(())
    for micro_step in range(args.micro):
        x, y = train_loader.next_batch()
        model.require_backward_grad_sync = micro_step == args.micro - 1
        logits, loss = model(x, y)
        loss = loss / args.micro
        loss_accum += loss.detach()
        loss.backward()
    dist.all_reduce(loss_accum)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
weights = sum(p.sum().item() for p in model.parameters())
loss = loss_accum.item() / ddp_world_size
print(f"rank {ddp_rank}: loss {loss:.5f} weights {weights:.6f}", flush=True)
dist.destroy_process_group()
