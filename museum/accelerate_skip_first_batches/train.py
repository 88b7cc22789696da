"""Accelerate: a training of three epochs that saves its state in the middle of the second, and can go on from there."""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCH, BATCH = 1, 2  # of the checkpoint
resumed = "--resume" in sys.argv
accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
torch.manual_seed(0)
rows = torch.randn(48, 5)
loader = DataLoader(TensorDataset(rows, rows.sum(1, keepdim=True)), batch_size=4, shuffle=True)
model = nn.Linear(5, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
if resumed:
    model.load_state_dict(torch.load("checkpoint.pt"))
for epoch in range(EPOCH if resumed else 0, 3):
    skipped = BATCH if resumed and epoch == EPOCH else 0
    loader.set_epoch(epoch)
    batches = accelerator.skip_first_batches(loader, skipped) if skipped else loader
    for number, (x, y) in enumerate(batches, skipped):
        if (epoch, number) == (EPOCH, BATCH) and not resumed and accelerator.is_main_process:
            torch.save(model.state_dict(), "checkpoint.pt")
        accelerator.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
accelerator.end_training()
