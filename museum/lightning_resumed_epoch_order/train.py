"""Lightning's Trainer with a worker that loads, a checkpoint at each epoch's end, and a resume from the second."""

import os
import sys

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(5, 1)

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


torch.manual_seed(0)
rows = torch.randn(40, 5)
data = TensorDataset(rows, rows.sum(1, keepdim=True))
trainer = L.Trainer(
    accelerator="cpu",
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    strategy="ddp",
    max_epochs=4,
    callbacks=[ModelCheckpoint(dirpath="kept", filename="{epoch}", save_top_k=-1)],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
resumed = "kept/epoch=1.ckpt" if "--resume" in sys.argv else None
trainer.fit(Net(), DataLoader(data, batch_size=4, shuffle=True, num_workers=1), ckpt_path=resumed)
