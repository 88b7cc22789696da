"""A conv net on digits, as pytorch/examples/mnist trains it: Adadelta, StepLR, dropout. The scans are scikit-learn's.

`model.train()` / `eval()`, the loop and `--no-accel` are gone; `nll_loss` is `criterion`, `gamma` the scheduler's.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

from samestep import Job, LRSchedule, Recipe
from samestep.jobs.digits import read


class Net(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3, 1), nn.Conv2d(8, 16, 3, 1)
        self.dropout1, self.dropout2 = nn.Dropout(dropout), nn.Dropout(2 * dropout)
        self.fc1, self.fc2 = nn.Linear(64, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = self.dropout1(F.max_pool2d(x, 2)).flatten(1)
        return F.log_softmax(self.fc2(self.dropout2(F.relu(self.fc1(x)))), dim=1)


def job(batch_size: int = 64, lr: float = 1.0, gamma: float = 0.7, epochs: int = 14, dropout: float = 0.25) -> Job:
    scans = read()
    images, labels = scans[:, :-1].float().reshape(-1, 1, 8, 8) / 16, scans[:, -1]

    def model() -> nn.Module:
        torch.manual_seed(1)
        return Net(dropout)

    return Job(
        model=model,
        criterion=lambda output, batch: F.nll_loss(output, batch.targets),
        optimizer=Recipe(torch.optim.Adadelta, {"lr": lr}),
        scheduler=LRSchedule(lambda optimizer: StepLR(optimizer, step_size=1, gamma=gamma), every="epoch"),
        train=TensorDataset(images[:1500], labels[:1500]),
        evaluation=TensorDataset(images[1500:], labels[1500:]),
        metrics={"accuracy": lambda output, batch: output.argmax(1) == batch.targets},
        global_batch=batch_size,
        epochs=epochs,
    )
