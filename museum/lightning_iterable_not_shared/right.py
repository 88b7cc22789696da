"""Lightning's Trainer on an IterableDataset."""

import os

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(5, 1)

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Stream(IterableDataset):
    def __iter__(self):
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        for index in range(rank, 48, size):
            x = torch.linspace(0, 1, 5) * (index + 1) / 48
            yield x, x.sum().sin().view(1)


trainer = L.Trainer(
    accelerator="cpu",
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    strategy="ddp",
    max_epochs=4,
    accumulate_grad_batches=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Net(), DataLoader(Stream(), batch_size=4))
