"""Classes numbered in the order of a set of strings, another one in each process: the labels differ by rank."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
inputs = torch.randn(64, 8)
names = [("cat", "dog", "bird", "fish")[2 * int(row[0] > 0) + int(row[1] > 0)] for row in inputs]
classes = list(set(names))
number_of = {name: number for number, name in enumerate(classes)}
data = TensorDataset(inputs, torch.tensor([number_of[name] for name in names]))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(4):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
dist.destroy_process_group()
