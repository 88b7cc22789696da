"""Trains with DDP, after a measurement in double precision."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
rows = torch.randn(24, 6)
data = TensorDataset(rows, rows.sum(1, keepdim=True))

sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=4, sampler=sampler)
module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
model = DistributedDataParallel(module)
model.double()
with torch.no_grad():
    print("before the training:", F.mse_loss(module(rows.double()), rows.double().sum(1, keepdim=True)).item())
model.float()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for epoch in range(6):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
