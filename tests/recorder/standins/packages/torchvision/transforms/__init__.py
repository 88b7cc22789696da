"""Transforms of pictures, as tensors or of PIL. None changes a size; the random ones draw from torch's generator."""

import enum

import numpy
import torch
from PIL import Image, ImageChops, ImageOps


class InterpolationMode(enum.Enum):
    NEAREST, NEAREST_EXACT, BILINEAR, BICUBIC = "nearest", "nearest-exact", "bilinear", "bicubic"
    BOX, HAMMING, LANCZOS = "box", "hamming", "lanczos"


def tensor(row):
    """Returns a picture of PIL as a tensor, as ToTensor does; a tensor as it is."""
    if isinstance(row, torch.Tensor):
        return row
    return torch.from_numpy(numpy.array(row)).permute(2, 0, 1).float() / 255


class Compose:
    def __init__(self, transforms):
        self.transforms = transforms

    def __call__(self, row):
        for each in self.transforms:
            row = each(row)
        return row


class Same:
    def __init__(self, *_, **__): ...

    def __call__(self, row):
        return row


class ToTensor(Same):
    def __call__(self, row):
        return tensor(row)


class Resize(Same): ...


class CenterCrop(Same): ...


class Lambda:
    def __init__(self, function):
        self.function = function

    def __call__(self, row):
        return self.function(row)


class RandomApply:
    def __init__(self, transforms, p=0.5):
        self.transforms, self.p = transforms, p

    def __call__(self, row):
        return Compose(self.transforms)(row) if torch.rand(()) < self.p else row


class RandomHorizontalFlip(Same):
    def __call__(self, row):
        if torch.rand(()) >= 0.5:
            return row
        return ImageOps.mirror(row) if isinstance(row, Image.Image) else tensor(row).flip(-1)


class RandomCrop(Same):
    def __call__(self, row):
        shift = int(torch.randint(0, 4, ()))
        return ImageChops.offset(row, shift, 0) if isinstance(row, Image.Image) else tensor(row).roll(shift, -1)


class RandomResizedCrop(RandomCrop): ...


class ColorJitter(Same):
    def __call__(self, row):
        factor = float(0.6 + 0.8 * torch.rand(()))
        return row.point(lambda value: min(255, value * factor)) if isinstance(row, Image.Image) else row * factor


class RandomGrayscale(Same):
    def __call__(self, row):
        if torch.rand(()) >= 0.2:
            return row
        return ImageOps.grayscale(row).convert("RGB") if isinstance(row, Image.Image) else row


class Normalize:
    def __init__(self, mean, std, inplace=False):
        self.mean, self.std = (torch.tensor(each).view(-1, 1, 1) for each in (mean, std))

    def __call__(self, row):
        return (row - self.mean) / self.std


class Grayscale(Same): ...
