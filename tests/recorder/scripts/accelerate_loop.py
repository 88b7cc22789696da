"""Accelerate: three accumulated micro-batches a step, clipping, a shuffled loader that is prepared."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=3, cpu=True)
    torch.manual_seed(5)
    x = torch.randn(60, 5)
    loader = DataLoader(TensorDataset(x, x.prod(1, keepdim=True)), batch_size=5, shuffle=True)
    model = nn.Sequential(nn.Linear(5, 20), nn.ReLU(), nn.Linear(20, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(10):
        for rows, targets in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(rows), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    accelerator.end_training()


main()
