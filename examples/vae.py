"""A variational autoencoder, as pytorch/examples/vae: BCE plus KL divergence, Adam.

The original sums its loss over the batch, which makes the step grow with the batch; a criterion is a mean over rows,
so the sum is divided by them. Each replica draws its own noise, so that N
ranks are not one process, as expected.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from samestep import Batch, Job, Recipe
from samestep.jobs.digits import read


class VAE(nn.Module):
    def __init__(self, hidden: int = 40, latent: int = 8) -> None:
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(64, hidden), nn.Linear(hidden, latent), nn.Linear(hidden, latent)
        self.fc3, self.fc4 = nn.Linear(latent, hidden), nn.Linear(hidden, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = F.relu(self.fc1(x))
        mean, logvar = self.fc21(hidden), self.fc22(hidden)
        z = mean + torch.randn_like(mean) * torch.exp(logvar / 2) if self.training else mean
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mean, logvar


def loss(output: tuple[Tensor, Tensor, Tensor], batch: Batch) -> Tensor:
    restored, mean, logvar = output
    apart = F.binary_cross_entropy(restored, batch.targets, reduction="sum")
    divergence = -0.5 * torch.sum(1 + logvar - mean.pow(2) - logvar.exp())
    return (apart + divergence) / len(restored)


def job(batch_size: int = 128, lr: float = 1e-3, epochs: int = 10) -> Job:
    images = read()[:, :-1].float() / 16

    def model() -> nn.Module:
        torch.manual_seed(1)
        return VAE()

    return Job(
        model=model,
        criterion=loss,
        optimizer=Recipe(torch.optim.Adam, {"lr": lr}),
        train=TensorDataset(images[:1500], images[:1500]),
        evaluation=TensorDataset(images[1500:], images[1500:]),
        global_batch=batch_size,
        epochs=epochs,
    )
