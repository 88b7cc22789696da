"""DCGAN, as pytorch/examples' dcgan: a discriminator and a generator, each with its Adam, which take turns.

Both are one module, so that an engine wraps both. The noise is drawn in `augment`, from a generator of the row and the
epoch: the same noise on any number of ranks. As in the public script the two phases of a batch share it.
"""

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from samestep import Job, Phase, Recipe
from samestep.jobs.digits import read

NOISE = 32


class Gan(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.ConvTranspose2d(NOISE, 2 * width, 2, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.ConvTranspose2d(width, 1, 4, 2, 1, bias=False),
            nn.Tanh(),
        )
        self.discriminator = nn.Sequential(
            nn.Conv2d(1, width, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, 2 * width, 4, 2, 1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.LeakyReLU(0.2),
            nn.Conv2d(2 * width, 1, 2, bias=False),
            nn.Flatten(0),
        )

    def forward(self, noise: Tensor, real: Tensor | None) -> tuple[Tensor, ...]:
        """Returns what the discriminator says of the generator's images, and of the real ones."""
        fake = self.generator(noise[:, :, None, None])
        if real is None:
            return (self.discriminator(fake),)
        return self.discriminator(fake.detach()), self.discriminator(real)


def cross_entropy(logits: Tensor, real: bool) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))


def job(batch_size: int = 64, width: int = 32, lr: float = 2e-4, epochs: int = 25) -> Job:
    images = read()[:, :-1].float().view(-1, 1, 8, 8) / 8 - 1

    def model() -> nn.Module:
        torch.manual_seed(0)
        gan = Gan(width)
        for weight in (p for p in gan.parameters() if p.dim() > 1):
            nn.init.normal_(weight, 0.0, 0.02)
        return gan

    def with_noise(sample: tuple[Tensor], generator: Generator) -> tuple[Tensor, Tensor]:
        return torch.randn(NOISE, generator=generator), sample[0]

    adam = Recipe(torch.optim.Adam, {"lr": lr, "betas": (0.5, 0.999)})
    return Job(
        model=model,
        phases=(
            Phase(
                "discriminator",
                parameters="discriminator",
                forward=lambda gan, batch: gan(*batch.data),
                criterion=lambda output, batch: cross_entropy(output[0], False) + cross_entropy(output[1], True),
                optimizer=adam,
            ),
            Phase(
                "generator",
                parameters="generator",
                forward=lambda gan, batch: gan(batch.inputs, None),
                criterion=lambda output, batch: cross_entropy(output[0], True),
                optimizer=adam,
            ),
        ),
        train=TensorDataset(images),
        augment=with_noise,
        global_batch=batch_size,
        epochs=epochs,
    )
