"""Accelerate: a training that is resumed in the middle of its second epoch, and goes on with a third one."""

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
torch.manual_seed(0)
rows = torch.randn(48, 5)
loader = DataLoader(TensorDataset(rows, rows.sum(1, keepdim=True)), batch_size=4, shuffle=True)
model = nn.Linear(5, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
loader.iteration = 1  # as load_state restores it
for epoch in range(1, 5):
    batches = accelerator.skip_first_batches(loader, 2) if epoch == 1 else loader
    loader.iteration = epoch
    for x, y in batches:
        accelerator.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
accelerator.end_training()
