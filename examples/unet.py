"""A U-Net that segments images, as milesial/Pytorch-UNet: cross entropy plus Dice, RMSprop, clipping.

The original's Dice is of the whole batch; of each image, and then their mean, it is a mean over rows. Its BatchNorm
sees one rank's rows (`--set norm=batch`): not one process, as expected. GroupNorm, the default here, is the same on any
number.
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from samestep import Batch, Job, Recipe


class UNet(nn.Module):
    def __init__(self, width: int, norm: str) -> None:
        super().__init__()

        def block(before: int, after: int) -> nn.Sequential:
            layer = nn.BatchNorm2d(after) if norm == "batch" else nn.GroupNorm(2, after)
            return nn.Sequential(nn.Conv2d(before, after, 3, padding=1, bias=False), layer, nn.ReLU())

        self.down1, self.down2 = block(1, width), block(width, 2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.out = nn.Sequential(block(2 * width, width), nn.Conv2d(width, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        wide = self.down1(x)
        deep = self.up(self.down2(F.max_pool2d(wide, 2)))
        return self.out(torch.cat([wide, deep], 1))[:, 0]


def dice(logits: Tensor, masks: Tensor) -> Tensor:
    """Of each image. shape [rows]"""
    found = logits.sigmoid()
    both, all_ = (found * masks).sum((1, 2)), (found + masks).sum((1, 2))
    return (2 * both + 1) / (all_ + 1)


def discs(rows: int, size: int = 16) -> TensorDataset:
    """Noisy images, each with a disc, and its mask."""
    draw = torch.Generator().manual_seed(0)
    centre, radius = torch.rand(rows, 2, generator=draw) * size, 2 + 4 * torch.rand(rows, generator=draw)
    y, x = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    masks = ((y - centre[:, :1, None]) ** 2 + (x - centre[:, 1:, None]) ** 2 < radius[:, None, None] ** 2).float()
    return TensorDataset((masks + 0.3 * torch.randn(rows, size, size, generator=draw))[:, None], masks)


def job(batch_size: int = 8, lr: float = 1e-4, width: int = 8, norm: Literal["group", "batch"] = "group") -> Job:
    images, masks = discs(150).tensors

    def model() -> nn.Module:
        torch.manual_seed(0)
        return UNet(width, norm)

    def criterion(output: Tensor, batch: Batch) -> Tensor:
        return F.binary_cross_entropy_with_logits(output, batch.targets) + 1 - dice(output, batch.targets).mean()

    return Job(
        model=model,
        criterion=criterion,
        optimizer=Recipe(torch.optim.RMSprop, {"lr": lr, "momentum": 0.9, "weight_decay": 1e-8}),
        train=TensorDataset(images[30:], masks[30:]),
        evaluation=TensorDataset(images[:30], masks[:30]),
        metrics={"dice": lambda output, batch: dice(output, batch.targets)},
        global_batch=batch_size,
        epochs=5,
        clip_norm=1.0,
    )
