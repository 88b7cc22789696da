"""Two optimizers: one with momentum for the matrices, AdamW for all others."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--warmup", type=int, default=0)
args = parser.parse_args()

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
tokens = torch.randint(0, 12, (64, 9))
data = TensorDataset(tokens[:, :-1], tokens[:, 1:])
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
model = DDP(nn.Sequential(nn.Embedding(12, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.Linear(16, 12)))
blocks = [p for name, p in model.named_parameters() if p.ndim == 2 and ".0." not in f".{name}"]
others = [p for name, p in model.named_parameters() if p.ndim != 2 or ".0." in f".{name}"]
muon = torch.optim.SGD(blocks, lr=0.2, momentum=0.95, nesterov=True)
adam = torch.optim.AdamW(others, lr=0.01)
optimizers = [muon, adam]
for optimizer in optimizers:
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
step = 0
for epoch in range(3):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        step += 1
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * min(1.0, step / args.warmup if args.warmup else 1.0)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=True)
weights = sum(p.sum().item() for p in model.parameters())
print(f"rank {rank}: loss {loss.item():.5f} weights {weights:.6f}", flush=True)
dist.destroy_process_group()
