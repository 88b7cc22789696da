"""Three accumulated micro-batches a step, and a schedule."""

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
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 24)
for epoch in range(10):
    sampler.set_epoch(epoch)
    for number, (x, y) in enumerate(loader):
        loss = F.mse_loss(model(x), y) / MICRO
        loss.backward()
        if (number + 1) % MICRO == 0:
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
dist.destroy_process_group()
