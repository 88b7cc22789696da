"""Image folders, as pytorch/examples/imagenet trains them: a residual net, crop and flip, SGD, StepLR every 30
epochs.

`--batch-size` is already all GPUs' there, as `global_batch` is here. `ImageFolder` decodes; random crops are drawn
from the generator that `augment` is given. The whole recipe is the built-in job `imagefolder`; this is its shape.
"""

from pathlib import Path

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR

from samestep import Batch, ImageFolder, Job, LRSchedule, Recipe
from samestep.data.images import Pixels, center_crop, flipped, random_resized_crop


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


def forward(network: nn.Module, batch: Batch) -> Tensor:
    """Images come as bytes [rows, height, width, 3]: a quarter of what floats would take on their way to the device."""
    return network(batch.inputs.permute(0, 3, 1, 2).to(next(network.parameters()).dtype) / 255)


def job(data: Path, batch_size: int = 256, lr: float = 0.1, epochs: int = 90, size: int = 224, width: int = 64) -> Job:
    train, held_out = ImageFolder(data / "train"), data / "val"

    def model() -> nn.Module:
        torch.manual_seed(0)
        stem = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, len(train.classes)))
        return nn.Sequential(stem, Residual(width), Residual(width), pooled)

    def augment(sample: tuple[Pixels, int], generator: Generator) -> tuple[Pixels, int]:
        return flipped(random_resized_crop(sample[0], size, generator), generator), sample[1]

    return Job(
        model=model,
        criterion=lambda output, batch: F.cross_entropy(output, batch.targets),
        optimizer=Recipe(torch.optim.SGD, {"lr": lr, "momentum": 0.9, "weight_decay": 1e-4}),
        scheduler=LRSchedule(lambda optimizer: StepLR(optimizer, step_size=30, gamma=0.1), every="epoch"),
        train=train,
        evaluation=ImageFolder(held_out, lambda pixels: center_crop(pixels, size, size * 256 // 224)),
        augment=augment,
        forward=forward,
        metrics={"top1": lambda output, batch: output.argmax(1) == batch.targets},
        global_batch=batch_size,
        epochs=epochs,
    )
