"""Three accumulated micro-batches a step; prints the mean loss of each."""

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

MICRO = 3
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=2, sampler=sampler)
model = DistributedDataParallel(nn.Linear(6, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for epoch in range(10):
    sampler.set_epoch(epoch)
    for number, (x, y) in enumerate(loader):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        loss = loss / MICRO
        if (number + 1) % MICRO == 0:
            print(f"loss {loss.item() * MICRO:.3f}")
            optimizer.step()
            optimizer.zero_grad()
dist.destroy_process_group()
