"""Lightning Fabric: a loader and a model that it sets up, three accumulated micro-batches a step, clipping."""

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

MICRO = 3


def main() -> None:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(3, verbose=False)
    x = torch.randn(72, 4)
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=6, shuffle=True))
    module = nn.Sequential(nn.Linear(4, 18), nn.Tanh(), nn.Linear(18, 2))
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9))
    for _ in range(10):
        for number, (rows, targets) in enumerate(loader):
            last = number % MICRO == MICRO - 1
            with fabric.no_backward_sync(model, enabled=not last):
                fabric.backward(nn.functional.cross_entropy(model(rows), targets) / MICRO)
            if last:
                fabric.clip_gradients(model, optimizer, max_norm=0.3)
                optimizer.step()
                optimizer.zero_grad()


main()
