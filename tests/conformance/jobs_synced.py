"""A job whose normalisation takes its statistics over all ranks: what torch's SyncBatchNorm does, and on a CPU too."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from samestep import Job, Recipe


class Everywhere(nn.Module):
    """[rows, channels, h, w] -> the same shape. In one process it is BatchNorm2d."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("variance", torch.ones(channels))
        self.mean: Tensor
        self.variance: Tensor

    def forward(self, x: Tensor) -> Tensor:
        mean, variance = self.mean, self.variance
        if self.training:
            count = self._over_ranks(torch.full((), float(x.numel() // x.shape[1]), dtype=x.dtype))
            mean = self._over_ranks(x.sum((0, 2, 3))) / count
            variance = self._over_ranks((x - mean[:, None, None]).square().sum((0, 2, 3))) / count
            with torch.no_grad():
                self.mean.lerp_(mean, 0.1)
                self.variance.lerp_(variance * count / (count - 1), 0.1)
        scale = self.weight / (variance + 1e-5).sqrt()
        return (x - mean[:, None, None]) * scale[:, None, None] + self.bias[:, None, None]

    def _over_ranks(self, value: Tensor) -> Tensor:
        return all_reduce(value.clone()) if dist.is_initialized() and dist.get_world_size() > 1 else value


def job(
    rows: int = 45, global_batch: int = 10, sync_batchnorm: bool = True, own: bool = True, dropout: float = 0.0
) -> Job:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(rows, 2, 6, 6, generator=generator) * torch.linspace(0.2, 3, rows)[:, None, None, None]
    labels = torch.randint(4, (rows,), generator=generator)

    def model() -> nn.Module:
        torch.manual_seed(3)
        norm = Everywhere(6) if own else nn.BatchNorm2d(6)
        convolved = (nn.Conv2d(2, 6, 3, padding=1), norm, nn.ReLU(), nn.Dropout(dropout), nn.Flatten())
        return nn.Sequential(*convolved, nn.Linear(6 * 36, 4))

    return Job(
        model=model,
        criterion=lambda output, batch: F.cross_entropy(output, batch.targets),
        optimizer=Recipe(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        train=TensorDataset(images, labels),
        evaluation=TensorDataset(images, labels),
        global_batch=global_batch,
        sync_batchnorm=sync_batchnorm,
    )
