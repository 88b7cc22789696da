"""A small diffusion model, as the many `ddpm` scripts: predict the noise that was mixed into an image.

The script draws noise and times inside its loop. Here `augment` draws them for each row, from a generator of the row
and the epoch, and the evaluation's are drawn once: N ranks train what one process trains.
"""

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from samestep import Job, Recipe
from samestep.jobs.digits import read

TIMES = 50
KEPT = torch.cumprod(1 - torch.linspace(1e-3, 0.2, TIMES), 0)  # of the image, at each time


class Denoiser(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.time = nn.Embedding(TIMES, width)
        self.inner, self.outer = nn.Linear(64, width), nn.Linear(width, 64)
        self.middle = nn.Sequential(nn.SiLU(), nn.Linear(width, width), nn.SiLU())

    def forward(self, images: Tensor, times: Tensor) -> Tensor:
        return self.outer(self.middle(self.inner(images) + self.time(times)))


def mixed(image: Tensor, generator: Generator) -> dict[str, Tensor]:
    time, noise = torch.randint(TIMES, (), generator=generator), torch.randn(64, generator=generator)
    return {"image": KEPT[time].sqrt() * image + (1 - KEPT[time]).sqrt() * noise, "time": time, "noise": noise}


def job(batch_size: int = 64, lr: float = 1e-3, epochs: int = 20, width: int = 64) -> Job:
    images = read()[:, :-1].float() / 8 - 1
    once = Generator().manual_seed(0)

    def model() -> nn.Module:
        torch.manual_seed(0)
        return Denoiser(width)

    return Job(
        model=model,
        forward=lambda network, batch: network(batch.data["image"], batch.data["time"]),
        criterion=lambda output, batch: F.mse_loss(output, batch.data["noise"]),
        optimizer=Recipe(torch.optim.AdamW, {"lr": lr}),
        train=TensorDataset(images[:1500]),
        augment=lambda sample, generator: mixed(sample[0], generator),
        evaluation=[mixed(image, once) for image in images[1500:]],
        global_batch=batch_size,
        epochs=epochs,
    )
