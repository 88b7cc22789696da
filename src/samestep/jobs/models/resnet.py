"""ResNet-18 and ResNet-50: K. He et al., "Deep Residual Learning for Image Recognition", 2015 (arXiv:1512.03385).

The stride of a bottleneck is in its 3x3 convolution, as torchvision does it (ResNet "v1.5"). The names of parameters
are torchvision's, so that its weights load.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

Norm = Callable[[int], nn.Module]  # of so many channels


def _grouped(channels: int) -> nn.Module:
    """Y. Wu and K. He, "Group Normalization", 2018: 32 groups, fewer where they would have less than 2 channels."""
    return nn.GroupNorm(math.gcd(32, max(1, channels // 2)), channels)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions. [rows, inplanes, h, w] -> [rows, planes, h / stride, w / stride]"""

    expansion = 1

    def __init__(self, inplanes: int, planes: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, 1, bias=False)
        self.bn1 = norm(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = _ending(norm(planes))
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _shortcut(inplanes, planes, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        out: Tensor = self.relu(self.bn2(self.conv2(y)) + self.downsample(x))
        return out


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1. [rows, inplanes, h, w] -> [rows, 4 planes, h / stride, w / stride]"""

    expansion = 4

    def __init__(self, inplanes: int, planes: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 1, bias=False)
        self.bn1 = norm(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, stride, 1, bias=False)
        self.bn2 = norm(planes)
        self.conv3 = nn.Conv2d(planes, 4 * planes, 1, bias=False)
        self.bn3 = _ending(norm(4 * planes))
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _shortcut(inplanes, 4 * planes, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        out: Tensor = self.relu(self.bn3(self.conv3(y)) + self.downsample(x))
        return out


def _ending(norm: nn.Module) -> nn.Module:
    """Sets the weight of a block's last norm to 0, so that the block starts as the identity. Returns the norm.

    P. Goyal et al., "Accurate, Large Minibatch SGD", 2017; torchvision's zero_init_residual.
    """
    nn.init.zeros_(norm.weight)  # type: ignore[arg-type]
    return norm


def _shortcut(inplanes: int, planes: int, stride: int, norm: Norm) -> nn.Module:
    if stride == 1 and inplanes == planes:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(inplanes, planes, 1, stride, bias=False), norm(planes))


class ResNet(nn.Module):
    """Images -> logits [rows, classes]. Images are normalised tensors [rows, 3, height, width], or pixels in 0..255,
    uint8 [rows, height, width, 3], which it normalises itself: a quarter of the bytes is copied to the device.

    blocks: how many in each of the four stages. width: planes of the first stage. small: for images of 32x32, the
    first convolution is 3x3 and nothing is pooled before the stages. norm: 'group' normalises each image by itself, so
    that a training does not depend on how its batches are divided. mean, std: of the training's pixels / 255.
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        blocks: tuple[int, int, int, int],
        classes: int,
        *,
        width: int = 64,
        small: bool = False,
        norm: Literal["batch", "group"] = "batch",
        mean: tuple[float, ...] = (0.485, 0.456, 0.406),
        std: tuple[float, ...] = (0.229, 0.224, 0.225),
    ) -> None:
        super().__init__()
        self.mean: Tensor
        self.scale: Tensor
        self.register_buffer("mean", 255 * torch.tensor(mean).view(3, 1, 1), persistent=False)
        self.register_buffer("scale", 1 / (255 * torch.tensor(std).view(3, 1, 1)), persistent=False)
        self.conv1 = nn.Conv2d(3, width, 3 if small else 7, 1 if small else 2, 1 if small else 3, bias=False)
        normalised: Norm = nn.BatchNorm2d if norm == "batch" else _grouped
        self.bn1 = normalised(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool: nn.Module = nn.Identity() if small else nn.MaxPool2d(3, 2, 1)
        planes = width

        def stage(number: int) -> nn.Sequential:
            nonlocal planes
            stacked = []
            for index in range(blocks[number]):
                stacked.append(block(planes, width * 2**number, 2 if number and index == 0 else 1, normalised))
                planes = width * 2**number * block.expansion
            return nn.Sequential(*stacked)

        self.layer1, self.layer2, self.layer3, self.layer4 = map(stage, range(4))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(planes, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.uint8:
            x = x.permute(0, 3, 1, 2).contiguous().to(self.mean.dtype).sub_(self.mean).mul_(self.scale)
            x = x.to(self.conv1.weight.dtype)  # which may be lower than the buffers'
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(torch.flatten(self.avgpool(x), 1))
        return logits


def resnet18(classes: int, **settings: Any) -> ResNet:
    return ResNet(BasicBlock, (2, 2, 2, 2), classes, **settings)


def resnet50(classes: int, **settings: Any) -> ResNet:
    return ResNet(Bottleneck, (3, 4, 6, 3), classes, **settings)
