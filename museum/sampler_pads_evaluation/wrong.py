"""Trains, and evaluates seven rows on all ranks after each epoch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
rows = torch.randn(24, 6)
data = TensorDataset(rows, (rows.sum(1) > 0).long())
held_out = Subset(data, range(7))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=4, sampler=sampler)
evaluation = DataLoader(held_out, batch_size=4, sampler=DistributedSampler(held_out, shuffle=False))
model = DistributedDataParallel(nn.Linear(6, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for epoch in range(6):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    wrong = torch.zeros(2)
    with torch.no_grad():
        for x, y in evaluation:
            wrong += torch.tensor([(model.module(x).argmax(1) != y).sum().item(), len(y)])
    dist.all_reduce(wrong)
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: {wrong[0] / wrong[1]:.3f} of {int(wrong[1])} rows are wrong")
    model.train()
dist.destroy_process_group()
