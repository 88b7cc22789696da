"""Barlow Twins' loss with features gathered from all ranks, on DDP."""

import importlib.util
import runpy
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
rows = torch.randn(48, 6)
data = TensorDataset(rows, rows + 0.1 * torch.randn(48, 6))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
model = DistributedDataParallel(nn.Linear(6, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
package = importlib.util.find_spec("lightly")  # the package itself needs torchvision, its loss does not
assert package and package.origin
loss_file = Path(package.origin).parent / "loss" / "barlow_twins_loss.py"
criterion = runpy.run_path(str(loss_file))["BarlowTwinsLoss"](gather_distributed=True)
for epoch in range(6):
    sampler.set_epoch(epoch)
    for x, y in loader:
        features = model(torch.cat([x, y]))
        loss = criterion(*features.chunk(2))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
