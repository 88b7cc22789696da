"""Are two digits the same? As pytorch/examples/siamese_network: one trunk for both images, BCE, Adadelta.

The original draws each pair from numpy when it is read; here row n's pair is drawn from n, so that it is the same
pair on every rank and in every process.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

from samestep import Job, LRSchedule, Recipe
from samestep.jobs.digits import read


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 32))
        self.head = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return torch.sigmoid(self.head(torch.cat([self.trunk(first), self.trunk(second)], 1))).flatten()


def pairs(images: Tensor, labels: Tensor, seed: int) -> TensorDataset:
    """Each image with another one: half of the pairs are of one class."""
    draw = torch.Generator().manual_seed(seed)
    of_class = [(labels == label).nonzero().flatten() for label in range(10)]
    wanted = torch.arange(len(images)) % 2 == 0
    other = (labels + torch.randint(1, 10, labels.shape, generator=draw)) % 10
    classes = torch.where(wanted, labels, other).tolist()
    partner = [of_class[c][torch.randint(len(of_class[c]), (), generator=draw)] for c in classes]
    return TensorDataset(images, images[torch.stack(partner)], wanted.float())


def job(batch_size: int = 64, lr: float = 1.0, gamma: float = 0.7, epochs: int = 14) -> Job:
    scans = read()
    images, labels = scans[:, :-1].float().reshape(-1, 1, 8, 8) / 16, scans[:, -1]

    def model() -> nn.Module:
        torch.manual_seed(1)
        return Siamese()

    return Job(
        model=model,
        forward=lambda network, batch: network(batch.data[0], batch.data[1]),
        criterion=lambda output, batch: F.binary_cross_entropy(output, batch.data[2]),
        optimizer=Recipe(torch.optim.Adadelta, {"lr": lr}),
        scheduler=LRSchedule(lambda optimizer: StepLR(optimizer, step_size=1, gamma=gamma), every="epoch"),
        train=pairs(images[:1500], labels[:1500], seed=0),
        evaluation=pairs(images[1500:], labels[1500:], seed=1),
        metrics={"accuracy": lambda output, batch: (output > 0.5) == (batch.data[2] > 0.5)},
        global_batch=batch_size,
        epochs=epochs,
    )
