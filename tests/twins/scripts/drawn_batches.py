"""A language model whose batches are drawn in the loop, with the loss outside of the model, and an evaluation on
rank 0."""

import argparse

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--accumulate", type=int, default=2)
parser.add_argument("--dropout", type=float, default=0.0)
parser.add_argument("--draw", choices=("torch", "numpy"), default="torch")
args = parser.parse_args()
ROWS, LENGTH, VOCABULARY = 4, 8, 17


class Model(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.dropout = nn.Dropout(args.dropout)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens):
        return self.head(self.dropout(self.embedding(tokens)))


def get_batch(text):
    last = len(text) - LENGTH
    places = torch.randint(last, (ROWS,))
    if args.draw == "numpy":
        places = torch.from_numpy(np.random.randint(0, last, (ROWS,)))
    x = torch.stack([text[i : i + LENGTH] for i in places])
    y = torch.stack([text[i + 1 : i + 1 + LENGTH] for i in places])
    return x, y


def loss_of(model, x, y):
    return F.cross_entropy(model(x).view(-1, VOCABULARY), y.view(-1))


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(7)
text = torch.randint(VOCABULARY, (2000,))
torch.manual_seed(1337 + rank)
np.random.seed(1337 + rank)
model = DDP(Model())
rate = 0.2
optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
micro_steps = args.accumulate // world
x, y = get_batch(text[:1600])
for step in range(12):
    optimizer.zero_grad()
    for micro_step in range(micro_steps):
        model.require_backward_grad_sync = micro_step == micro_steps - 1
        loss = loss_of(model, x, y) / micro_steps
        x, y = get_batch(text[:1600])
        loss.backward()
    optimizer.step()
    if step % 4 == 3 and rank == 0:
        model.eval()
        with torch.no_grad():
            print(f"step {step}: val {loss_of(model.module, *get_batch(text[1600:])).item():.4f}", flush=True)
        model.train()
print(f"rank {rank}: {sum(p.square().sum() for p in model.parameters()).item():.6f}", flush=True)
dist.destroy_process_group()
