"""A denoising autoencoder. Its noise is drawn in `augment`, from a generator of the row and the epoch: the same noise
on any number of ranks, where `torch.randn_like` inside the loop would be each rank's own."""

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from samestep import Job, Recipe
from samestep.jobs.digits import read


def job(batch_size: int = 64, noise: float = 0.3, lr: float = 1e-3, epochs: int = 10) -> Job:
    images = read()[:, :-1].float() / 16

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8), nn.Linear(8, 32), nn.ReLU(), (nn.Linear(32, 64))
        )

    def noisy(sample: tuple[Tensor, Tensor], generator: Generator) -> tuple[Tensor, Tensor]:
        clean = sample[1]
        return clean + noise * torch.randn(clean.shape, generator=generator), clean

    return Job(
        model=model,
        criterion=lambda output, batch: F.mse_loss(output, batch.targets),
        optimizer=Recipe(torch.optim.Adam, {"lr": lr}),
        train=TensorDataset(images[:1500], images[:1500]),
        evaluation=TensorDataset(images[1500:], images[1500:]),
        augment=noisy,
        global_batch=batch_size,
        epochs=epochs,
    )
