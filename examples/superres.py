"""Super resolution with PixelShuffle, as pytorch/examples/super_resolution: MSE, Adam. Small digits become large
ones."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from samestep import Job, Recipe
from samestep.jobs.digits import read


def job(batch_size: int = 32, lr: float = 1e-3, epochs: int = 10, width: int = 16) -> Job:
    large = read()[:, :-1].float().reshape(-1, 1, 8, 8) / 16
    small = F.avg_pool2d(large, 2)

    def model() -> nn.Module:
        torch.manual_seed(123)
        first, second = nn.Conv2d(1, width, 5, padding=2), nn.Conv2d(width, width, 3, padding=1)
        last = nn.Conv2d(width, 4, 3, padding=1)
        for conv in (first, second):
            nn.init.orthogonal_(conv.weight, nn.init.calculate_gain("relu"))
        return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), last, nn.PixelShuffle(2))

    return Job(
        model=model,
        criterion=lambda output, batch: F.mse_loss(output, batch.targets),
        optimizer=Recipe(torch.optim.Adam, {"lr": lr}),
        train=TensorDataset(small[:1500], large[:1500]),
        evaluation=TensorDataset(small[1500:], large[1500:]),
        metrics={"psnr": lambda output, batch: -10 * (output - batch.targets).pow(2).mean((1, 2, 3)).log10()},
        global_batch=batch_size,
        epochs=epochs,
    )
