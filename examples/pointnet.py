"""PointNet's part segmentation, as fxia22/pointnet.pytorch trains it: which part of a table is each point of a cloud?

The dataset draws points, a rotation and jitter from numpy's global generator, as the public one does; samestep seeds
these draws by the row. The public script moves its rate at the beginning of an epoch, this one at the end.
"""

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import Dataset

from samestep import Batch, Job, LRSchedule, Recipe

PARTS = 3  # the top, the legs, the foot


class Tables(Dataset[tuple[Tensor, Tensor]]):
    """Tables of any size, each a cloud of as many points as its file would have."""

    def __init__(self, first: int, rows: int, points: int, augmented: bool) -> None:
        self.points, self.augmented = points, augmented
        self.clouds = [self.cloud(np.random.default_rng(row)) for row in range(first, first + rows)]

    @staticmethod
    def cloud(draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        parts = draw.integers(0, PARTS, draw.integers(2000, 3000))
        height, (deep, wide) = np.array([1.0, draw.random(), 0.0])[parts], draw.uniform(0.5, 1.5, 2)
        spread = np.array([1.0, 0.1, 0.5])[parts]
        flat = draw.uniform(-1, 1, (2, len(parts))) * spread
        return np.stack([flat[0] * deep, height, flat[1] * wide], 1).astype(np.float32), parts

    def __len__(self) -> int:
        return len(self.clouds)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        cloud, parts = self.clouds[index]
        chosen = np.random.choice(len(parts), self.points)
        cloud = cloud[chosen] - cloud[chosen].mean(0)
        cloud = cloud / np.linalg.norm(cloud, axis=1).max()
        if self.augmented:
            angle = np.random.uniform(0, 2 * np.pi)
            cloud[:, [0, 2]] @= np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]], np.float32)
            cloud += np.random.normal(0, 0.02, cloud.shape).astype(np.float32)
        return torch.from_numpy(cloud), torch.from_numpy(parts[chosen])


class Pointwise(nn.Sequential):
    """The same layers for each point: [rows, widths[0], points] to [rows, widths[-1], points]."""

    def __init__(self, *widths: int) -> None:
        super().__init__(
            *(nn.Sequential(nn.Conv1d(a, b, 1), nn.BatchNorm1d(b), nn.ReLU()) for a, b in pairwise(widths))
        )


class Alignment(nn.Module):
    """A matrix for each cloud, from all of its points: [rows, size, points] to [rows, size, size]."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.size, self.points = size, Pointwise(size, width, 2 * width, 16 * width)
        hidden = [(16 * width, 8 * width), (8 * width, 4 * width)]
        layers = (nn.Sequential(nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU()) for a, b in hidden)
        self.head = nn.Sequential(*layers, nn.Linear(4 * width, size * size))

    def forward(self, points: Tensor) -> Tensor:
        change = self.head(self.points(points).max(2).values).view(-1, self.size, self.size)
        return change + torch.eye(self.size, device=change.device)


class PointNet(nn.Module):
    def __init__(self, width: int, aligned: bool) -> None:
        super().__init__()
        self.first_alignment, self.first = Alignment(3, width), Pointwise(3, width)
        self.alignment = Alignment(width, width) if aligned else None
        self.rest = Pointwise(width, 2 * width, 16 * width)
        self.head = nn.Sequential(
            Pointwise(17 * width, 8 * width, 4 * width, 2 * width), nn.Conv1d(2 * width, PARTS, 1)
        )

    def forward(self, clouds: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the log probability of each point's parts, [rows, points, PARTS], and the features' matrix."""
        points = clouds.transpose(1, 2)
        each = self.first(self.first_alignment(points).transpose(1, 2) @ points)
        matrix = self.alignment(each) if self.alignment else None
        if matrix is not None:
            each = matrix.transpose(1, 2) @ each
        whole = self.rest(each).max(2, keepdim=True).values.expand(-1, -1, each.shape[2])
        return self.head(torch.cat([whole, each], 1)).transpose(1, 2).log_softmax(2), matrix


def iou(output: tuple[Tensor, Tensor | None], batch: Batch) -> Tensor:
    """The mean over the parts of each cloud's intersection over union: 1 for a part that is nowhere. [rows]"""
    found, parts = output[0].argmax(2)[..., None], torch.arange(PARTS, device=output[0].device)
    here, there = found == parts, batch.targets[..., None] == parts
    either = (here | there).sum(1)
    return torch.where(either == 0, 1.0, (here & there).sum(1) / either.clamp(min=1)).mean(1)


def job(
    batch_size: int = 32,
    points: int = 2500,
    width: int = 64,
    feature_transform: bool = False,
    lr: float = 1e-3,
    epochs: int = 25,
) -> Job:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return PointNet(width, feature_transform)

    def criterion(output: tuple[Tensor, Tensor | None], batch: Batch) -> Tensor:
        found, matrix = output
        loss = F.nll_loss(found.flatten(0, 1), batch.targets.flatten())
        if matrix is None:
            return loss
        apart = matrix @ matrix.transpose(1, 2) - torch.eye(matrix.shape[1], device=matrix.device)
        return loss + 0.001 * apart.norm(dim=(1, 2)).mean()  # of each cloud by itself: a mean over the rows

    return Job(
        model=model,
        criterion=criterion,
        optimizer=Recipe(torch.optim.Adam, {"lr": lr}),
        scheduler=LRSchedule(lambda optimizer: StepLR(optimizer, step_size=20, gamma=0.5), every="epoch"),
        train=Tables(0, 200, points, augmented=True),
        evaluation=Tables(200, 40, points, augmented=False),
        metrics={
            "accuracy": lambda output, batch: (output[0].argmax(2) == batch.targets).float().mean(1),
            "iou": iou,
        },
        global_batch=batch_size,
        epochs=epochs,
    )
